"""The command `regrain`. There is nothing to import from here: the library is `loader` and `checkpointing`."""
