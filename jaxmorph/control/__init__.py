"""Decides from timings: what ops and links cost now, which links ail, and what to do about it.

From a link's measurement to a morph, in order: `measurements` (what each message of a step took),
`profiler` (what planning is told), `route_record` and `direction_watch` (one route, one direction
of a link: late, in time, at another level), `detector` (all of them), `verdicts` (what is said of
them), `conditions` (what links would do on other routes), `orchestrator` (whether to morph).
`compute_watch` watches ops, `failed_links` and `fail_back` direct paths.
"""
