"""Joins the halves: runs a rank's instructions on its stage's compiled programs and routes."""
