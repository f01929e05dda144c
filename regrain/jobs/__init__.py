"""What each command does. A job is imported when it is asked for, since what it stands on takes a second."""
