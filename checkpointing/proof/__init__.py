"""Proof that a run resumes exactly: the drill, and the comparison of two runs."""
