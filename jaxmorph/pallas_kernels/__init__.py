"""Kernels that copy between a GPU's memory and a slot in host memory.

`copy_to_host`, which also signals, and `copy_from_host` (`kernels`) are traced and compiled like
other JAX functions, for CUDA. Control words hold a slot's addresses (`SlotControl`, `pack`), so one
program serves all slots of a channel. `assembly` has their PTX, and `tuning` decides which thread
copies which bytes. `mosaic` is the only module that knows Pallas, and imports it when a kernel is
traced or `require_kernels` is called.

None of the kernels has run on a GPU yet; `docs/explanation/gpu.md` says what is verified.
"""

from jaxmorph.pallas_kernels.control import CONTROL_WORDS, SlotControl, new_arrivals, pack
from jaxmorph.pallas_kernels.kernels import copy_from_host, copy_to_host
from jaxmorph.pallas_kernels.mosaic import NoKernelsError, require_kernels
from jaxmorph.pallas_kernels.tuning import FROM_HOST, TO_HOST, CopyTuning

__all__ = [
    "CONTROL_WORDS",
    "FROM_HOST",
    "TO_HOST",
    "CopyTuning",
    "NoKernelsError",
    "SlotControl",
    "copy_from_host",
    "copy_to_host",
    "new_arrivals",
    "pack",
    "require_kernels",
]
