"""Finds out what this machine can do for a run, and why not what it can't."""
