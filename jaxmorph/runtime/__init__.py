"""One rank: runs its instructions on its stage's compiled programs, its queue and its routes.

Start at `executor` (an instruction becomes an item of the queue) and `queue` (XLA's own, or a paced
one). `stage_trainer` builds them, with the routes, from `stage_settings`.
Messages: `routes` is the interface, `direct` (with `link_programs`) and `delegated` implement it.
`payloads` are what they carry, `emulated_links` makes links slow.
When a direct path fails, `failover_route` sends its messages delegated, `link_switch` lets the two
ends agree, `link_connections` connects them, and `direct_probe` measures a path before its reuse.
A whole step: `step` (run, exchange, update) with `report` over the `rendezvous`, then `tied`,
`optimizer` and `stage_state`.
Processes: `launcher` with `started_rank`, `rank_process`, `join` with `xla_settings`, `connection`
(only between ranks of the run), `kept_programs`; `host_copies` run beside the queue. `causes` finds
the rank or link that caused a failure.
"""
