"""Kernels that copy between a GPU's memory and a slot in host memory, and signal that they have.

`copy_to_host` and `copy_from_host` (`kernels`) are traced and compiled as other JAX functions are,
for CUDA. Their slots are addresses in control words (`SlotControl`, `pack`), so one program serves
all slots of a channel. `assembly` has the pieces of PTX that they are made of, `tuning` who copies
what, and `mosaic` alone knows Pallas, which is imported when a kernel is traced, or
`require_kernels` asks for it.

None of the kernels has run on a GPU yet; `docs/explanation/gpu.md` says what is verified.
"""

from jaxmorph.pallas_kernels.control import (
    CONTROL_WORDS,
    LONGEST_SPIN_US,
    SlotControl,
    new_arrivals,
    not_ready,
    pack,
)
from jaxmorph.pallas_kernels.kernels import copy_from_host, copy_to_host
from jaxmorph.pallas_kernels.mosaic import NoKernelsError, require_kernels
from jaxmorph.pallas_kernels.tuning import FROM_HOST, TO_HOST, CopyTuning

__all__ = [
    "CONTROL_WORDS",
    "FROM_HOST",
    "LONGEST_SPIN_US",
    "TO_HOST",
    "CopyTuning",
    "NoKernelsError",
    "SlotControl",
    "copy_from_host",
    "copy_to_host",
    "new_arrivals",
    "not_ready",
    "pack",
    "require_kernels",
]
