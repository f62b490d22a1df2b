"""How a payload gets between a stage's device and the slots of the data plane: a file a chapter.

`programs` says what a way of copying is; `choosing` lists those that a device has, the best first,
and takes the first that passes its `trial`. `host_memory` has those by the host, `cuda_driver` the
calls by which a device knows slots, `copy_engine` and `kernels` copies by the device into them,
`registered_landing` (with `dlpack_memory`) and `kernels` out of them.
"""
