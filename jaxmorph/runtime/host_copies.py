"""Copies of stashes to pinned host memory and back, beside the rank's queue.

Each direction has a thread that runs its copies in order, as an accelerator has a copy engine for
each direction. `device_put` to another memory kind compiles nothing, but can't donate (JAX 0.10 to
0.12), so the source is deleted once the copy is done.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from jaxmorph.program.instructions import Buffer
from jaxmorph.runtime.queue import Stamp, sleep_until

Tree = Any
Kind = Literal["offload", "fetch"]

HOST_MEMORY = "pinned_host"  # JAX's memory kind
_LOOK_S = 0.1  # how often a wait checks whether the queue has failed


@dataclass(frozen=True)
class CopyLabel:
    """The label of a copy's stamp."""

    kind: Kind
    stash: Buffer


@dataclass
class AwayStash:
    """A stash on its way to host memory and back.

    Attributes:
        gone: Done when the host has it and the device's arrays are deleted.
        back: Done when the device has it again.
        arrays: The stash, wherever it is; None once taken.
        shardings: Its shardings on the device.
    """

    stash: Buffer
    gone: Future[Stamp] = field(default_factory=Future)
    back: Future[Stamp] = field(default_factory=Future)
    arrays: Tree = None
    shardings: Tree = None

    def take(self) -> Tree:
        """The stash, once it is back; the caller owns it."""
        arrays, self.arrays = self.arrays, None
        return arrays

    def cancel(self) -> None:
        """Wake threads that wait for it: it will not come."""
        self.gone.cancel()
        self.back.cancel()


class HostCopies:
    """A rank's two copy engines.

    Args:
        bytes_per_s: Speed of each on a paced accelerator; None: as fast as this machine's.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._out = _Engine("offload", bytes_per_s)
        self._in = _Engine("fetch", bytes_per_s)

    def offload(self, away: AwayStash, arrays: Tree, made_s: float) -> None:
        """Start to move a stash, which was ready at `made_s`, to host memory."""
        away.arrays = arrays
        away.shardings = jax.tree.map(lambda leaf: leaf.sharding, arrays)
        on_host = jax.tree.map(lambda each: each.with_memory_kind(HOST_MEMORY), away.shardings)
        self._out.submit(away.gone, lambda: self._out.copy(away, on_host, made_s))

    def fetch(self, away: AwayStash, after: AwayStash | None, free_s: float) -> None:
        """Start to move a stash back, once there is room.

        Args:
            after: The stash whose place it takes; None: there is room already.
            free_s: When the queue had run everything before, on the monotonic clock.
        """
        before = (away,) if after is None else (away, after)
        self._in.submit(away.back, lambda: self._to_device(away, before, free_s))

    def close(self) -> None:
        """Stop the engines after their current copies."""
        self._out.close()
        self._in.close()

    def _to_device(self, away: AwayStash, before: tuple[AwayStash, ...], free_s: float) -> Stamp:
        gone_s = [stash.gone.result().end_s for stash in before]
        return self._in.copy(away, away.shardings, max(free_s, *gone_s))


class _Engine:
    """One direction: a thread that copies in order; late wake-ups don't add up in its clock."""

    def __init__(self, kind: Kind, bytes_per_s: float | None) -> None:
        self._kind: Kind = kind
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._thread = ThreadPoolExecutor(1, f"jaxmorph-{kind}")

    def submit(self, over: Future[Stamp], work: Callable[[], Stamp]) -> None:
        self._thread.submit(_fulfil, over, work)

    def copy(self, away: AwayStash, shardings: Tree, ready_s: float) -> Stamp:
        """Copy a stash, no faster than a paced accelerator would."""
        start_s = max(self._free_s, ready_s)
        leaves = jax.tree.leaves(away.arrays)
        moved = jax.block_until_ready(jax.device_put(away.take(), shardings))
        end_s = time.monotonic()
        if self._bytes_per_s is not None:
            # The stage's devices copy their parts in parallel.
            size = sum(leaf.nbytes / len(leaf.sharding.device_set) for leaf in leaves)
            end_s = max(end_s, start_s + size / self._bytes_per_s)
            sleep_until(end_s)
        for leaf in leaves:
            leaf.delete()
        away.arrays, self._free_s = moved, end_s
        return Stamp(CopyLabel(self._kind, away.stash), start_s, end_s)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _fulfil(over: Future[Stamp], work: Callable[[], Stamp]) -> None:
    if not over.set_running_or_notify_cancel():
        return
    try:
        over.set_result(work())
    except BaseException as error:  # raised again where the copy is waited for
        over.set_exception(error)


def wait_for(over: Future[Stamp], deadline_s: float, check: Callable[[], None]) -> Stamp:
    """Wait until a copy is over; returns when it ran.

    Args:
        check: Raises the queue's error, after which the copy may never start.

    Raises:
        TimeoutError: If it is not over by the deadline.
    """
    while True:
        try:
            return over.result(timeout=_LOOK_S)
        except TimeoutError:
            check()
            if time.monotonic() > deadline_s:
                raise TimeoutError("a copy of a stash took too long") from None
