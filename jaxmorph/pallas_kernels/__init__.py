"""Kernels that copy between a GPU's memory and a slot in host memory, and signal that they have.

`copy_to_host` and `copy_from_host` are traced and compiled as other JAX functions are, for CUDA.
Their slots are addresses in control words (`SlotControl`, `pack`), so one program serves all slots
of a channel. `protocol` does the same on a host, `twins` in Pallas's interpreter, and the
references in plain `jax.numpy`. Pallas itself is imported when a kernel or a twin is traced, or
`require_kernels` asks for it.

None of the kernels has run on a GPU yet; `docs/gpu.md` says what is verified.
"""

from jaxmorph.pallas_kernels.checks import new_arrivals
from jaxmorph.pallas_kernels.control import (
    CONTROL_WORDS,
    LONGEST_SPIN_US,
    SlotControl,
    not_ready,
    pack,
    unpack,
)
from jaxmorph.pallas_kernels.copy_from_host import copy_from_host, copy_from_host_reference
from jaxmorph.pallas_kernels.copy_to_host import copy_to_host, copy_to_host_reference
from jaxmorph.pallas_kernels.protocol import copy_from_slot, copy_to_slot, is_acknowledged
from jaxmorph.pallas_kernels.requirements import NoKernelsError, require_kernels
from jaxmorph.pallas_kernels.tuning import FROM_HOST, TO_HOST, CopyTuning
from jaxmorph.pallas_kernels.twins import copy_from_host_twin, copy_to_host_twin

__all__ = [
    "CONTROL_WORDS",
    "FROM_HOST",
    "LONGEST_SPIN_US",
    "TO_HOST",
    "CopyTuning",
    "NoKernelsError",
    "SlotControl",
    "copy_from_host",
    "copy_from_host_reference",
    "copy_from_host_twin",
    "copy_from_slot",
    "copy_to_host",
    "copy_to_host_reference",
    "copy_to_host_twin",
    "copy_to_slot",
    "is_acknowledged",
    "new_arrivals",
    "not_ready",
    "pack",
    "require_kernels",
    "unpack",
]
