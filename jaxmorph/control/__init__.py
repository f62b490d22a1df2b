"""Decides from timings what ops and links cost, which links are degraded, and whether to morph.

From a measurement to a morph, in order: `measurements` (the time of each message and op),
`rank_times` (each rank's reports of them, which rank 0 joins),
`profiler` (costs to plan with), `route_record` (the messages of one route of one direction),
`link_state` (the states of links and their transitions), `verdicts`, `direction_watch` and
`detector` (which reach verdicts), `conditions` (delays on other routes), `orchestrator` (whether to
morph). `compute_watch` watches ops. `controller` joins all: `advance(state, observation)`, with the
values of `controller_state`. State is frozen: a function that takes a step returns the next state.

`answer` solves the command line's planning problems. It alone reads a clock, to time planning.
"""
