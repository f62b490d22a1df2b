"""What runs, in which order. Pure, without JAX.

Read `ops` and `costs`, then `schedule` (rows of ops, and their rules) and `replay` (the pipeline's
data, and how links delay it), on which `simulate` makes a `timeline`; `bubbles` says why stages
idle in one. Schedules come from `fixed` (gpipe to zb-h2, interleaved), `paper` (Algorithms 1 to 4)
and `adaptive`, both by way of `list_schedule`; `bound` is what no schedule beats, `order_graph` the
longest paths that the adaptive search shortens. `planner` chooses. `partition` cuts layers.

The command line: `problem`, `what_if`, `answer`, `report`, `files`.
"""
