"""The host-side data plane: carries a link's messages through host memory, beside the accelerator.

The sender posts a message into one of its slots; the receiver takes it from one of its own, in
order and exactly once, whatever the network does. The rank's own process is the *trainer*, the
process that moves its data its *sidecar*. `...End` is the trainer's side of the shared memory,
`...Channel` the sidecar's side of it; `_Channel` in the engine only counts. Read in this order:

`names`, `slots`, `doorbell`, `plane`: a rank's end, in memory that it shares with its sidecar.
`secret`, `wire`, `incoming`, `outgoing_queue`, `outgoing_lanes`, `outgoing`: the
engine, without I/O. `event_loop`, `lanes`, `nixl_lanes`, `connecting`: connections that carry its
frames, and who may make them.
`link`, `receiving_link`, `sending_link`, `sidecar`: the sidecar process. `sidecar_process`,
`client`: the trainer's handle on it. `several_sidecars`: a rank's data plane with one or several;
`sidecar_trial` measures what they move. `link_emulator` slows links down or cuts them;
`host` finds addresses and counts processors.
"""
