"""Training from a script of the user's own: how its processes start, meet and end.

`launch` and `rank` start it on this machine, `meeting` has its processes find one another, and
`inputs` reads what it gives: its configuration and its batches. `trainer.py` is what it calls.
"""
