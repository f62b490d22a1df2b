"""Both kernels on the machine, each with all the memory that it may touch and no more."""

import random
from dataclasses import dataclass

from ptx_machine import Machine
from ptx_memory import Memory

from jaxmorph.pallas_kernels.control import SlotControl, pack
from jaxmorph.pallas_kernels.copy_from_host import assembly as from_host_assembly
from jaxmorph.pallas_kernels.copy_to_host import assembly as to_host_assembly
from jaxmorph.pallas_kernels.tiling import Tiling

PAYLOAD, CONTROL, ARRIVALS, ANSWER, SLOT, SIGNAL, ACKNOWLEDGEMENT = (
    0x7_0000_0000 + place * 0x1000_0000 for place in range(7)
)
WORDS = (ANSWER, SIGNAL, ACKNOWLEDGEMENT)
OPERANDS = {
    to_host_assembly: (PAYLOAD, CONTROL, ARRIVALS, ANSWER),
    from_host_assembly: (CONTROL, ARRIVALS, PAYLOAD, ANSWER),
}


@dataclass
class KernelRun:
    """What a kernel ran in."""

    tiling: Tiling
    memory: Memory
    machine: Machine

    def word(self, address: int) -> int:
        return self.memory.load(address, 4)

    def bytes_at(self, address: int) -> bytes:
        return bytes(self.memory.regions[address])


def prepare(assembly, tiling: Tiling, control: SlotControl, seed: int, text=None) -> KernelRun:
    """A kernel that has not run yet, with random bytes where it copies from."""
    source, target = (PAYLOAD, SLOT) if assembly is to_host_assembly else (SLOT, PAYLOAD)
    memory = Memory({
        source: bytearray(random.Random(seed).randbytes(tiling.num_bytes)),
        target: bytearray(tiling.num_bytes),
        CONTROL: bytearray(pack(control).tobytes()),
        ARRIVALS: bytearray(8),
        **{word: bytearray(4) for word in WORDS},
    })  # fmt: skip
    machine = Machine(
        text or assembly(tiling), OPERANDS[assembly], memory, tiling.ctas, tiling.threads, seed
    )
    return KernelRun(tiling, memory, machine)
