"""The command `regrain`: one module a command, `app` to start them, `console` to print with."""
