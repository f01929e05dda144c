"""The sections of the benchmark: what is measured, each in a module of its own."""
