"""Decides from timings: what ops and links cost now, which links are degraded, and what to do.

From a link's measurement to a morph, in order: `measurements` (what each message of a step took),
`profiler` (what planning goes by), `route_record` (what the messages of one route say),
`link_state` (the states of links, and what follows from what), `verdicts` (what is said of a
link), `direction_watch` and `detector` (say it), `conditions` (what links would do on other
routes), `orchestrator` (whether to morph). `compute_watch` watches ops. `controller` is the whole:
`advance(state, observation)`, with the values of `controller_state`. What is kept from step to step
is frozen: what takes in a step returns what comes after.
"""
