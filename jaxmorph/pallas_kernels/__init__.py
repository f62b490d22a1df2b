"""Kernels that copy between a GPU's memory and a slot in host memory.

`copy_to_host`, which also signals, and `copy_from_host` (`kernels`) are traced and compiled like
other JAX functions, for CUDA. Control words hold a slot's addresses (`SlotControl`, `pack`), so one
program serves all slots of a channel. `assembly` has their PTX, and `tuning` decides which thread
copies which bytes. `mosaic` is the only module that knows Pallas, and imports it when a kernel is
traced or `require_kernels` is called.

None of the kernels has run on a GPU yet; `docs/explanation/gpu.md` says what is verified.
"""
