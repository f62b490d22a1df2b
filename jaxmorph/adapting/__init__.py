"""Joins `control` to a run: rank 0 finds out and decides, all ranks swap plans between two steps.

In order: `starting_point` (what is known before the first step), `control_loop` (rank 0: a step's
timings in, a morph out), `planning_client` and `planning_process` (plans are made beside training),
`probes` (what a link's way back to direct waits for), `control_events` (a morph, and the events
that tell of it), `adaptation` (what every rank does), `path_reports` (what ranks tell of direct
paths that fail, and what rank 0 makes of it).
"""
