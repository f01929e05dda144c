"""The parts of scripts/fault_drill.py: a small run, and three kinds of faults that it is put through."""
