"""Delays of links that change while a run lasts, and what those who emulate links are told."""
