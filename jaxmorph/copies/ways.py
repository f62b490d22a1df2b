"""The ways to copy that there are on a device, the best first.

On GPUs that is the order in which they should disturb the device's work least. None of them has run
on one yet, so no measurement stands behind it, but this: the copy engine works beside JAX's stream,
on which kernels and callbacks hold up what is computed next; and after a kernel that goes wrong
nothing can be tried any more, so it is not tried where the copy engine does.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import NoReturn

from jax.sharding import Sharding

from jaxmorph.copies.copy_engine import CopyEngineTier
from jaxmorph.copies.cuda_driver import CudaDriver, CudaError
from jaxmorph.copies.host_callbacks import IoCallbackTier, host_callback_tiers
from jaxmorph.copies.host_landing import HostLandingTier
from jaxmorph.copies.host_memory import is_on_host
from jaxmorph.copies.kernel_copies import KernelTier
from jaxmorph.copies.kernel_landing import KernelLandingTier
from jaxmorph.copies.payload import SlotUse
from jaxmorph.copies.pinned_host import PinnedHostTier
from jaxmorph.copies.programs import CopyTier, LandingTier
from jaxmorph.copies.registered_landing import RegisteredLandingTier
from jaxmorph.copies.registered_memory import RegisteredMemory
from jaxmorph.copies.stream_callback import StreamCallbackTier
from jaxmorph.transport.plane import MemoryKeeper

_log = logging.getLogger(__name__)

OpenDriver = Callable[[int], CudaDriver]
TellOfMemory = Callable[[MemoryKeeper], None]

WITHOUT_DRIVER = ("pinned_host", "io_callback")
"""Who names one of these wants no slot registered."""


@dataclass(frozen=True)
class WaysToCopy:
    """What there is to choose from.

    Attributes:
        outgoing: Tiers that copy into slots, the best first.
        incoming: Tiers that copy out of slots, the best first.
        memory: The slots as the device knows them; None where none needs to.
        ending: Ends whatever the tiers have begun.
    """

    outgoing: Sequence[CopyTier]
    incoming: Sequence[LandingTier]
    memory: RegisteredMemory | None = None
    ending: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """End it all; a device that has failed keeps nothing else from ending."""
        try:
            self.ending.close()
        except CudaError as error:
            _log.warning("copies could not be ended as they should: %s", error)


def ways_to_copy(
    placement: Sharding,
    tell_of_memory: TellOfMemory,
    *,
    with_driver: bool = True,
    open_driver: OpenDriver = CudaDriver.open,
) -> WaysToCopy:
    """The ways that there are where a stage keeps its arrays; whether they work is not tried.

    Args:
        tell_of_memory: Has a keeper told of the memory of all slots.
        with_driver: Whether slots may be registered with the device's driver.
        open_driver: Opens it, given the device's number.
    """
    ending = ExitStack()
    pinned = PinnedHostTier()
    ending.callback(pinned.close)
    host = HostLandingTier()
    if is_on_host(placement):
        return WaysToCopy([*host_callback_tiers(), pinned], [host], None, ending)
    rest = WaysToCopy([pinned, IoCallbackTier()], [host], None, ending)
    if not with_driver:
        return rest
    try:
        return _with_driver(placement, tell_of_memory, open_driver, rest)
    except CudaError as error:
        into = [AbsentTier(name, error) for name in _INTO_BY_DRIVER]
        out_of = [AbsentTier(name, error) for name in _OUT_OF_BY_DRIVER]
        return replace(rest, outgoing=[*into, *rest.outgoing], incoming=[*out_of, *rest.incoming])


_INTO_BY_DRIVER = (CopyEngineTier.name, KernelTier.name, StreamCallbackTier.name)
_OUT_OF_BY_DRIVER = (RegisteredLandingTier.name, KernelLandingTier.name)


def _with_driver(
    placement: Sharding, tell_of_memory: TellOfMemory, open_driver: OpenDriver, rest: WaysToCopy
) -> WaysToCopy:
    """The ways that need slots which the driver knows, and the rest behind them.

    Raises:
        CudaError: If the driver can't be had, or doesn't take the slots.
    """
    ending, pinned, host = rest.ending, rest.outgoing[0], rest.incoming[0]
    number = _device_number(placement)
    driver = open_driver(number)
    ending.callback(driver.close)
    memory = _registered(driver, tell_of_memory, ending)
    engine, kernels = CopyEngineTier(driver, memory, pinned), KernelTier(memory, pinned)
    landing = RegisteredLandingTier(memory, number, host)
    kernel_landing = KernelLandingTier(memory, host)
    for tier in (engine, kernels, landing, kernel_landing):
        ending.callback(tier.close)
    into = [engine, kernels, StreamCallbackTier(driver, memory, pinned), *rest.outgoing]
    return WaysToCopy(into, [landing, kernel_landing, *rest.incoming], memory, ending)


def _registered(
    driver: CudaDriver, tell_of_memory: TellOfMemory, ending: ExitStack
) -> RegisteredMemory:
    """The slots as the driver knows them, all of them.

    Raises:
        CudaError: If any can't be registered.
    """
    memory = RegisteredMemory(driver)
    ending.callback(memory.close)
    tell_of_memory(memory)
    if memory.trouble is not None:
        memory.close()
        raise memory.trouble
    return memory


def _device_number(placement: Sharding) -> int:
    first = min(placement.device_set, key=lambda device: device.id)
    number = first.local_hardware_id
    if number is None:
        raise CudaError("cuDeviceGet", None, f"JAX has no number for {first}")
    return number


class AbsentTier:
    """Stands for a tier that can't be had here."""

    def __init__(self, name: str, reason: Exception) -> None:
        self.name, self._reason = name, reason

    def compile(self, use: SlotUse, placement: Sharding) -> NoReturn:
        """Raise the reason."""
        raise self._reason

    def settle(self) -> None:
        """Nothing is ever begun."""
