"""How several JAX processes, and signals, act on one run."""
