"""How each rank runs a schedule. Pure, without JAX.

Read `instructions`, then `lowering`, from a schedule to each rank's list of them, which `dataflow`
agrees on with the executor. `check` replays all ranks before any of them runs, `blocking` says when
they would run, `offload` has stashes wait in host memory, `slots_needed` sizes a link's slots.
"""
