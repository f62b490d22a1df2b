"""Copies of payloads between a stage's device and the slots of the data plane, by several backends.

`backends` declares what a copy backend is. `choosing` lists the backends of a device, best first,
and takes the first that passes its `trial`; `split_copies` let several devices share a message.
`host_memory` copies on the host. `copy_engine` and `kernels` copy from a GPU into slots,
`registered_receive` (with `dlpack_memory`) and `kernels` out of them; `cuda_driver` wraps the
driver calls that make slots known to a GPU. No backend has run on a GPU yet;
`docs/explanation/gpu.md` says what is verified.
"""
