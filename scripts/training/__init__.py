"""What scripts/train.py can train: each task is data, a model and its step, in a module of its own."""
