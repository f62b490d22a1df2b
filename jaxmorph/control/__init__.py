"""Decides from timings: what ops and links cost now."""
