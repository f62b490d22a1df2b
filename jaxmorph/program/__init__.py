"""How each rank runs a schedule. Pure, without JAX.

Read `instructions`, then `lowering`, which turns a schedule into each rank's instructions, and
`dataflow`, the buffers they read and write. `check` replays all ranks before any of them runs,
`blocking` simulates their times, `offload` moves stashes to host memory, and `slots_needed` sizes
the slots of a link.
"""
