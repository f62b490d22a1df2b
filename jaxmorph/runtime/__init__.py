"""One rank: runs its instructions on its stage's compiled programs, its queue and its routes.

Start at `executor` (an instruction becomes an item of the queue) and `queue` (XLA's own, or a paced
one). `stage_trainer` builds them, with the routes, from `stage_settings`.
Messages: `routes` is the interface, `direct` (with `link_programs`) and `delegated` implement it.
`payloads` are what they carry, `emulated_links` makes links slow.
A direct path that fails: `failover_route` continues delegated, `link_switch` lets the two ends
agree, `link_connections` connects them, and `direct_probe` measures a path before it is used again.
A whole step: `step` (run, exchange, update) with `report` over the `rendezvous`, then `tied`,
`optimizer` and `stage_state`.
Processes: `launcher` with `started_rank`, `rank_process`, `join` with `xla_settings`, `connection`
(only ranks of the run have one), `kept_programs`; `host_copies` run beside the queue. `causes`:
whose failure it is.
"""
