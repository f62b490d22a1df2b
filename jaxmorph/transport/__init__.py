"""The host-side data plane: carries a link's messages through host memory, beside the accelerator.

The sender posts a message into a slot at its end; the receiver takes it from a slot at the other
end, in order and exactly once, whatever the network does. The rank's own process is the *trainer*;
a *sidecar* is the process that moves its data. `...End` is the trainer's side of the shared memory,
`...Channel` is the sidecar's side; `_Channel` in the engine only counts. Read in this order:

`names`, `slots`, `doorbell`, `plane`: a rank's end, in memory that it shares with its sidecar.
`secret`, `wire`, `incoming`, `outgoing_queue`, `outgoing_lanes`, `outgoing`: the
engine, without I/O. `event_loop`, `lanes`, `nixl_lanes`, `connecting`: connections that carry its
frames, and who may make them.
`link`, `receiving_link`, `sending_link`, `sidecar`: the sidecar process. `sidecar_process`,
`client`: the trainer's handle on it. `several_sidecars`: a data plane with one sidecar or several;
`sidecar_trial` measures what they move. `link_emulator` slows links down or cuts them;
`host` finds addresses and counts processors.
"""
