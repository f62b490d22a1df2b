"""The copy backends of a device, best first, and the choice of the first that works.

On GPUs the first should disturb computation least. No measurement supports the order yet, only two
facts. The copy engine works beside JAX's stream, while kernels and callbacks delay the next op of
that stream. And a faulty kernel ends all GPU work of its process, so kernels are not even tried
where the copy engine works.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import NoReturn, TypeVar

from jax.sharding import Sharding, SingleDeviceSharding

from jaxmorph.copies.backends import ReceiveBackend, SendBackend, SlotUse
from jaxmorph.copies.copy_engine import CopyEngineSend
from jaxmorph.copies.cuda_driver import CudaDriver, CudaError, RegisteredMemory
from jaxmorph.copies.host_memory import (
    HostReceive,
    ImmediateSend,
    PinnedHostSend,
    host_callback_backends,
    is_on_host,
)
from jaxmorph.copies.kernels import KernelReceive, KernelSend
from jaxmorph.copies.registered_receive import RegisteredReceive
from jaxmorph.copies.split_copies import SplitReceive, SplitSend
from jaxmorph.copies.trial import try_receive, try_send
from jaxmorph.errors import UserError
from jaxmorph.transport.plane import MemoryRegistry

AUTO = "auto"
WITHOUT_DRIVER = ("pinned_host", "io_callback")
"""Backends that need no registered slots: if the user names one, no slot is registered."""

OpenDriver = Callable[[int], CudaDriver]
ReportMemory = Callable[[MemoryRegistry], None]

_OTHER_DEVICE = "it is not for the device that JAX computes on"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CopyBackends:
    """The backends to choose from, best first.

    Attributes:
        memory: The slots as registered with the device; None if no backend needs that.
        resources: Closes what the backends have opened.
    """

    outgoing: Sequence[SendBackend]
    incoming: Sequence[ReceiveBackend]
    memory: RegisteredMemory | None = None
    resources: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Close all of them; an error of the device is only logged."""
        try:
            self.resources.close()
        except CudaError as error:
            _log.warning("copies did not close cleanly: %s", error)


def copy_backends(
    placement: Sharding,
    report_memory: ReportMemory,
    *,
    with_driver: bool = True,
    open_driver: OpenDriver = CudaDriver.open,
) -> CopyBackends:
    """The backends for arrays kept at `placement`; none of them has been tried yet.

    Args:
        with_driver: Whether slots may be registered with the device's driver.
    """
    resources = ExitStack()
    pinned = PinnedHostSend()
    resources.callback(pinned.close)
    host = HostReceive()
    buffer_callback, io_callback = host_callback_backends()
    if is_on_host(placement):
        return CopyBackends([buffer_callback, io_callback, pinned], [host], None, resources)
    rest = CopyBackends([pinned, io_callback], [host], None, resources)
    if not with_driver:
        return rest
    try:
        return _with_driver(placement, report_memory, open_driver, rest)
    except CudaError as error:
        absent = [UnavailableBackend(name, error) for name in _BY_DRIVER]
        outgoing, incoming = [*absent, *rest.outgoing], [*absent, *rest.incoming]
        return replace(rest, outgoing=outgoing, incoming=incoming)


_BY_DRIVER = (CopyEngineSend.name, KernelSend.name)
"""Backends for both directions; they need registered slots."""


def _with_driver(
    placement: Sharding, report_memory: ReportMemory, open_driver: OpenDriver, rest: CopyBackends
) -> CopyBackends:
    """The backends that need registered slots, and the rest behind them."""
    resources, pinned, host = rest.resources, rest.outgoing[0], rest.incoming[0]
    number = _device_number(placement)
    driver = open_driver(number)
    resources.callback(driver.close)
    memory = _registered(driver, report_memory, resources)
    engine, kernels = CopyEngineSend(driver, memory, pinned), KernelSend(memory, pinned)
    registered, kernel_receive = (
        RegisteredReceive(memory, number, host),
        KernelReceive(memory, host),
    )
    for backend in (engine, kernels, registered, kernel_receive):
        resources.callback(backend.close)
    outgoing = [engine, kernels, *rest.outgoing]
    return CopyBackends(outgoing, [registered, kernel_receive, *rest.incoming], memory, resources)


def _registered(
    driver: CudaDriver, report_memory: ReportMemory, resources: ExitStack
) -> RegisteredMemory:
    """All slots, registered with the driver; raises its error if it refuses any."""
    memory = RegisteredMemory(driver)
    resources.callback(memory.close)
    report_memory(memory)
    if memory.error is not None:
        memory.close()
        raise memory.error
    return memory


def _device_number(placement: Sharding) -> int:
    first = min(placement.device_set, key=lambda device: device.id)
    number = first.local_hardware_id
    if number is None:
        raise CudaError("cuDeviceGet", None, f"JAX has no number for {first}")
    return number


class UnavailableBackend:
    """Stands for a backend that this machine lacks; `compile` raises the reason."""

    def __init__(self, name: str, reason: Exception) -> None:
        self.name, self._reason = name, reason

    def compile(self, use: SlotUse, placement: Sharding) -> NoReturn:
        """Raise the reason."""
        raise self._reason

    def settle(self) -> None:
        """Nothing to wait for."""


Backend = TypeVar("Backend", bound=SendBackend | ReceiveBackend)


def first_working(
    backends: Sequence[Backend], attempt: Callable[[Backend], None], direction: str
) -> Backend:
    """The first backend that passes its trial; logs a warning for each that fails before it.

    Args:
        attempt: Tries one backend; raises if it doesn't work.
        direction: "into" or "out of" slots, for messages.

    Raises:
        RuntimeError: If none works; the message lists the reasons.
    """
    failures: list[tuple[str, str]] = []
    for backend in backends:
        reason = failure_reason(backend, attempt)
        if reason is None:
            _warn_of(failures, direction)
            return backend
        failures.append((backend.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in failures)
    raise RuntimeError(f"no way to copy {direction} a slot works here: {reasons}")


def _warn_of(failures: Sequence[tuple[str, str]], direction: str) -> None:
    for reason, same in groupby(failures, key=itemgetter(1)):
        names = [name for name, _ in same]
        listed = " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
        _log.warning("copies %s slots by %s don't work here: %s", direction, listed, reason)


def named_backend(
    backends: Sequence[Backend], attempt: Callable[[Backend], None], wanted: str
) -> Backend:
    """The backend that the user has chosen.

    Raises:
        UserError: If it doesn't work here; the message names those that do.
    """
    found = next((backend for backend in backends if backend.name == wanted), None)
    reason = _OTHER_DEVICE if found is None else failure_reason(found, attempt)
    if found is not None and reason is None:
        return found
    others = (backend for backend in backends if backend is not found)
    working = [backend.name for backend in others if failure_reason(backend, attempt) is None]
    raise UserError(
        f"transport.copies: got {wanted}, which doesn't work here ({reason}), expected "
        f"{', '.join([AUTO, *working])}"
    )


def failure_reason(backend: Backend, attempt: Callable[[Backend], None]) -> str | None:
    """Why a backend doesn't work here, in one line; None if it works."""
    try:
        attempt(backend)
    except Exception as error:  # any error at all: another backend may work
        return " ".join(repr(error).split())
    return None


@dataclass(frozen=True)
class StageCopies:
    """The backends that a stage copies with, and all that were available."""

    outgoing: SendBackend
    incoming: ReceiveBackend
    available: CopyBackends

    def close(self) -> None:
        """Close all backends after the last copy, and unregister the slots."""
        self.available.close()


def open_copies(
    placement: Sharding,
    report_memory: ReportMemory,
    wanted: str = AUTO,
    open_driver: OpenDriver = CudaDriver.open,
) -> StageCopies:
    """Try the backends in order and open the first that works in each direction.

    Args:
        placement: Where the stage keeps its arrays.
        report_memory: Reports the memory of all slots to a registry (`DataPlane.report_memory`).
        wanted: A backend's name, or "auto". If the stage has several devices, only backends without
            the driver work: slots would have to be registered with each device.

    Raises:
        UserError: If the wanted backend doesn't work here; the message names those that do.
        RuntimeError: If none works.
    """
    num_devices = len(placement.device_set)
    if num_devices > 1:
        placement = SingleDeviceSharding(min(placement.device_set, key=lambda each: each.id))
    if num_devices > 1 and wanted in _BY_DRIVER and not is_on_host(placement):
        raise UserError(
            f"transport.copies: got {wanted}, expected {AUTO} or {', '.join(WITHOUT_DRIVER)}: "
            f"each stage has {num_devices} devices, and slots are registered with one"
        )
    available = copy_backends(
        placement,
        report_memory,
        with_driver=wanted not in WITHOUT_DRIVER and num_devices == 1,
        open_driver=open_driver,
    )
    try:

        def into(backend: SendBackend) -> None:
            try_send(backend, placement, _needed_by(backend, available))

        if wanted == AUTO:
            outgoing = first_working(available.outgoing, into, "into")
        else:
            outgoing = named_backend(available.outgoing, into, wanted)
        outgoing, incoming = ImmediateSend(outgoing), _incoming(available, placement, wanted)
        if num_devices > 1:
            return StageCopies(SplitSend(outgoing), SplitReceive(incoming), available)
        return StageCopies(outgoing, incoming, available)
    except BaseException:
        available.close()
        raise


def _incoming(available: CopyBackends, placement: Sharding, wanted: str) -> ReceiveBackend:
    """The first that works; a wanted backend that also copies out of slots is tried first."""
    if len(available.incoming) == 1:
        return available.incoming[0]
    backends = sorted(available.incoming, key=lambda backend: backend.name != wanted)

    def out_of(backend: ReceiveBackend) -> None:
        try_receive(backend, placement, _needed_by(backend, available))

    return first_working(backends, out_of, "out of")


def _needed_by(
    backend: SendBackend | ReceiveBackend, available: CopyBackends
) -> RegisteredMemory | None:
    return available.memory if backend.name in _BY_DRIVER else None
