"""Decides from timings what ops and links cost, which links are degraded, and whether to morph.

From a measurement to a morph, in order: `measurements` (the time of each message and op),
`rank_times` (what one rank reports of them, and rank 0 joins),
`profiler` (costs to plan with), `route_record` (the messages of one route of one direction),
`link_state` (the states of links and their transitions), `verdicts`, `direction_watch` and
`detector` (which reach them), `conditions` (delays on other routes), `orchestrator` (whether to
morph). `compute_watch` watches ops. `controller` joins all: `advance(state, observation)`, with the
values of `controller_state`. State is frozen: a function that takes a step returns the next state.

The command line's problems: `answer`, which alone reads a clock: how long planning takes.
"""
