"""One rank: runs its instructions on its stage's compiled programs, its queue and its routes.

Start at `executor` (an instruction becomes an item of the queue) and `queue` (XLA's own, or a paced
one); `stage_trainer` is all that a rank trains with, `stage_settings` what that is built from.
Messages: `routes` (what a route is), `direct`, `delegated`, and `stage_routes`, which opens those
of a rank; `payloads` says what they carry, `emulated_links` how links are made slow.
A direct path that fails: `failover_route` (what takes its place at once), `link_switch` (how the
two ends agree), `link_connections` (what they have to each other), `direct_probe`.
A step, whole: `step` (run, meet, update) with `report` over the `rendezvous`; `tied`, `optimizer`
and `stage_state` at its end.
Processes: `launcher`, `rank_process`, `join`, `kept_programs`; `host_copies` beside the queue.
"""
