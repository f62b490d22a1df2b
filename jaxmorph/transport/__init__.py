"""The host-side data plane: moves a link's messages through host memory, beside the accelerator.

A message is posted into a slot of the sender's (`slots`, `plane`), and taken from one of the
receiver's, in order and exactly once, whatever its network does. To be read in this order:

`names`, `slots`, `doorbell`, `plane`: what a rank sees, in memory that it shares with its sidecar.
`channel`, `wire`, `incoming`, `outgoing_queue`, `outgoing_lanes`, `outgoing`: the engine, without
I/O. `event_loop`, `lanes`, `nixl_lanes`, `connecting`: what carries its frames. `link`,
`receiving_link`, `sending_link`, `sidecar`: the process. `sidecar_process`, `client`: the trainer's
end of it. `link_emulator` makes links slow or cuts them; `network_cards` finds addresses.
"""
