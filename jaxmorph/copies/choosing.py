"""How a rank's messages are copied: the ways that there are, the best first; the first that works.

On GPUs the order is that in which they should disturb the device's work least. None of them has run
on one yet, so no measurement stands behind it, but this: the copy engine works beside JAX's stream,
on which kernels and callbacks hold up what is computed next; and after a kernel that goes wrong
nothing can be tried any more, so it is not tried where the copy engine does.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import NoReturn, Protocol, TypeVar

from jax.sharding import Sharding

from jaxmorph.copies.copy_engine import CopyEngineTier, StreamCallbackTier
from jaxmorph.copies.cuda_driver import CudaDriver, CudaError, RegisteredMemory
from jaxmorph.copies.host_memory import (
    AtOnceTier,
    HostLandingTier,
    PinnedHostTier,
    host_callback_tiers,
    is_on_host,
)
from jaxmorph.copies.kernels import KernelLandingTier, KernelTier
from jaxmorph.copies.programs import CopyTier, LandingTier, SlotUse
from jaxmorph.copies.registered_landing import RegisteredLandingTier
from jaxmorph.copies.trial import try_landing, try_tier
from jaxmorph.errors import UserError
from jaxmorph.transport.plane import MemoryKeeper

AUTO = "auto"
WITHOUT_DRIVER = ("pinned_host", "io_callback")
"""Who names one of these wants no slot registered."""

OpenDriver = Callable[[int], CudaDriver]
TellOfMemory = Callable[[MemoryKeeper], None]

_NOT_FOR_THIS = "it is not for the device that JAX computes on"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WaysToCopy:
    """What there is to choose from, the best first.

    Attributes:
        outgoing: Into slots.
        incoming: Out of slots.
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
        with_driver: Whether slots may be registered with the device's driver.
    """
    ending = ExitStack()
    pinned = PinnedHostTier()
    ending.callback(pinned.close)
    host = HostLandingTier()
    buffer_callback, io_callback = host_callback_tiers()
    if is_on_host(placement):
        return WaysToCopy([buffer_callback, io_callback, pinned], [host], None, ending)
    rest = WaysToCopy([pinned, io_callback], [host], None, ending)
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
    """The ways that need slots which the driver knows, and the rest behind them."""
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
    """The slots as the driver knows them; raises if it doesn't take all of them."""
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


class _Named(Protocol):
    name: str


Tier = TypeVar("Tier", bound=_Named)


def first_that_works(
    tiers: Sequence[Tier], attempt: Callable[[Tier], None], direction: str
) -> Tier:
    """The first tier that passes its trial; of those before it, a warning says why they didn't.

    Args:
        attempt: Tries one; raises whatever goes wrong.
        direction: "into" or "out of" slots, for messages.

    Raises:
        RuntimeError: If none works; the message says why.
    """
    failures: list[tuple[str, str]] = []
    for tier in tiers:
        reason = why_not(tier, attempt)
        if reason is None:
            _warn_of(failures, direction)
            return tier
        failures.append((tier.name, reason))
    told = "; ".join(f"{name}: {reason}" for name, reason in failures)
    raise RuntimeError(f"no way to copy {direction} a slot works here: {told}")


def _warn_of(failures: Sequence[tuple[str, str]], direction: str) -> None:
    """Warn once of each reason."""
    for reason, same in groupby(failures, key=itemgetter(1)):
        names = [name for name, _ in same]
        listed = " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
        _log.warning("copies %s slots by %s don't work here: %s", direction, listed, reason)


def named_one(tiers: Sequence[Tier], attempt: Callable[[Tier], None], wanted: str) -> Tier:
    """The tier that the user has chosen.

    Raises:
        UserError: If it doesn't work here; it names those that do.
    """
    found = next((tier for tier in tiers if tier.name == wanted), None)
    reason = _NOT_FOR_THIS if found is None else why_not(found, attempt)
    if found is not None and reason is None:
        return found
    others = (tier for tier in tiers if tier is not found)
    working = [tier.name for tier in others if why_not(tier, attempt) is None]
    raise UserError(
        f"transport.copies: got {wanted}, which doesn't work here ({reason}), expected "
        f"{', '.join([AUTO, *working])}"
    )


def why_not(tier: Tier, attempt: Callable[[Tier], None]) -> str | None:
    """Why a tier doesn't work here; None if it does."""
    try:
        attempt(tier)
    except Exception as error:  # whatever it is: another one may do
        return " ".join(repr(error).split())
    return None


@dataclass(frozen=True)
class StageCopies:
    """How a stage copies, and what that was chosen from."""

    outgoing: CopyTier
    incoming: LandingTier
    ways: WaysToCopy

    def close(self) -> None:
        """End what copies have begun, once they are over; the driver forgets the slots."""
        self.ways.close()


def open_copies(
    placement: Sharding,
    tell_of_memory: TellOfMemory,
    wanted: str = AUTO,
    open_driver: OpenDriver = CudaDriver.open,
) -> StageCopies:
    """The ways of copying that a stage takes: each is tried, and the first that works is it.

    Args:
        placement: Where the stage keeps its arrays.
        tell_of_memory: Has a keeper told of the memory of all slots (`DataPlane.tell_of_memory`).
        wanted: A tier's name, or "auto".

    Raises:
        UserError: If the tier that is wanted doesn't work here; it names those that do.
        RuntimeError: If none works.
    """
    with_driver = wanted not in WITHOUT_DRIVER
    ways = ways_to_copy(placement, tell_of_memory, with_driver=with_driver, open_driver=open_driver)
    try:
        into = partial(try_tier, placement=placement, keeper=ways.memory)
        if wanted == AUTO:
            outgoing = first_that_works(ways.outgoing, into, "into")
        else:
            outgoing = named_one(ways.outgoing, into, wanted)
        return StageCopies(AtOnceTier(outgoing), _incoming(ways, placement, wanted), ways)
    except BaseException:
        ways.close()
        raise


def _incoming(ways: WaysToCopy, placement: Sharding, wanted: str) -> LandingTier:
    """The first that works; who names a way that copies out of slots too has that tried first."""
    if len(ways.incoming) == 1:
        return ways.incoming[0]
    tiers = sorted(ways.incoming, key=lambda tier: tier.name != wanted)
    out_of = partial(try_landing, placement=placement, keeper=ways.memory)
    return first_that_works(tiers, out_of, "out of")
