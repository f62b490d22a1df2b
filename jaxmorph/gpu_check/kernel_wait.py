"""The process that has a GPU kernel wait: `python -m jaxmorph.gpu_check.kernel_wait`.

`waits` starts it. It tells one JSON object, and ends when its stdin does.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmorph.copies.cuda_driver import CudaDriver
from jaxmorph.copies.registered_memory import RegisteredMemory
from jaxmorph.gpu_check.child_process import end_in_time, tell
from jaxmorph.gpu_check.device import find_device
from jaxmorph.pallas_kernels import SlotControl, copy_from_host, new_arrivals, not_ready, pack
from jaxmorph.transport.slots import Slots

SIZE = 1 << 16
"""Elements of the payload."""

_NUMBER = 1  # what the signal takes, of a first message


@dataclass(frozen=True)
class KernelWait:
    """What `copy_from_host` does while a signal doesn't come, and once it has.

    Attributes:
        spin_us: For how long it may wait.
        said_so: Whether its status was that of a message that isn't there.
        then_whole: Whether the same call gave the payload, and said so, once the signal was there.
    """

    spin_us: int
    waited_us: float
    said_so: bool
    then_whole: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Have the kernel wait in vain, and then not, and tell how that went.

    Args:
        arguments: Words after the command's name; those of this process when None.
    """
    parser = argparse.ArgumentParser(prog="python -m jaxmorph.gpu_check.kernel_wait")
    parser.add_argument("--spin-us", type=int, required=True, help="how long a kernel may wait")
    parser.add_argument("--limit-s", type=float, required=True, help="when this process ends")
    chosen = parser.parse_args(arguments)
    end_in_time(chosen.limit_s)
    device = find_device(allow_cpu=False)
    with _registered_slot(device) as (slots, memory):
        tell(**asdict(wait_for_signal(slots, memory.device_address, chosen.spin_us)))
    return 0


@contextmanager
def _registered_slot(device: Any) -> Iterator[tuple[Slots, RegisteredMemory]]:
    slots = Slots.create(1, 4 * SIZE)
    driver = CudaDriver.open(device.local_hardware_id or 0)
    memory = RegisteredMemory(driver)
    memory.add(*slots.memory)
    if memory.trouble is not None:
        raise memory.trouble
    yield slots, memory
    memory.close()
    slots.close()
    driver.close()


def wait_for_signal(
    slots: Slots,
    address_of: Callable[[int], int | None],
    spin_us: int,
    kernel: Callable[..., Any] = copy_from_host,
) -> KernelWait:
    """Have a kernel wait for a message that isn't there, and then for one that is.

    Args:
        slots: One, of the payload's length, whose first message hasn't come.
        address_of: Where the device finds what is at an address here.
        spin_us: For how long the kernel may wait.
    """
    payload = address_of(slots.payload_address(0))
    signal = address_of(slots.signal_address(0))
    if payload is None or signal is None:
        raise RuntimeError("the slot has no address on the device")
    control = jax.device_put(pack(SlotControl(payload, _NUMBER, signal, spin_us=spin_us)))
    arrivals = new_arrivals()
    copy = partial(kernel, shape=(SIZE,), dtype=jnp.uint32, slot_bytes=4 * SIZE)
    program = jax.jit(copy).lower(control, arrivals).compile()
    jax.block_until_ready((control, arrivals))
    jax.block_until_ready(program(control, arrivals))  # the first launch loads the program
    began_s = time.perf_counter()
    _, status = jax.block_until_ready(program(control, arrivals))
    waited_us = 1e6 * (time.perf_counter() - began_s)
    said_so = int(status[0]) == not_ready(_NUMBER)
    contents = np.arange(SIZE, dtype=np.uint32)
    slots.payload(0)[:] = contents.view(np.uint8)
    slots.mark_complete(0)
    got, status = program(control, arrivals)
    then_whole = int(status[0]) == _NUMBER and np.array_equal(np.asarray(got), contents)
    return KernelWait(spin_us, waited_us, said_so, then_whole)


if __name__ == "__main__":
    sys.exit(main())
