"""Decides from timings: what ops and links cost now, which links ail, and what to do about it.

From a link's measurement to a morph, in order: `measurements` (what each message of a step took),
`profiler` (what planning is told), `route_record` (what the messages of one route say), `verdicts`
(what may be said of a link, and what follows from what), `detector` (says it), `conditions` (what
links would do on other routes), `orchestrator` (whether to morph). `compute_watch` watches ops,
`failed_paths` direct paths that failed.
"""
