"""Environments: what judges an answer, and what a score becomes before it is learnt from."""
