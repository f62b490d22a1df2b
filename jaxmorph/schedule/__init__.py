"""What runs, in which order. Pure, without JAX.

Read `ops` and `costs`, then `schedule` (rows of ops and their rules) and `replay` (data
dependencies and link delays). `simulate` turns a schedule into a `timeline`; `bubbles` explains its
idle time. `fixed` builds gpipe to dualpipe-v; `paper` (Algorithms 1 to 4) and `adaptive` build on
`list_schedule`. `bound` is a lower bound on every schedule, and `order_graph` keeps the
longest paths that the adaptive search shortens. `planner` chooses. `partition` cuts layers.

The command line: `problem`, `what_if`, `files`.
"""
