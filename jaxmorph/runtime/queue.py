"""A rank's in-order queue: XLA's own, or a paced one that stands for a slower accelerator.

Everything a rank does in a step, ops and direct transfers alike, goes through its queue in the
order of its program, as kernels go through a GPU's stream: an item that waits holds up all behind
it (head-of-line blocking). The queue stamps when each item ran.
"""

import queue as standard_queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

Work = Callable[[], Any]


@dataclass(frozen=True)
class Stamp:
    """When one item ran, in seconds of the process's monotonic clock."""

    label: Any
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """How long the item held the queue."""
        return self.end_s - self.start_s


class DeviceQueue(Protocol):
    """Runs work in order."""

    def enqueue(
        self,
        label: Any,
        work: Work,
        duration_s: float | None = None,
        overlapped_s: float = 0.0,
    ) -> None:
        """Add an item.

        Args:
            label: What the stamp will name; None for bookkeeping that is not timed.
            work: Dispatches the item and returns arrays that are ready when it has run.
            duration_s: How long a paced queue makes the item last; None: as long as it takes.
            overlapped_s: How much of the item's time a paced queue doesn't charge.
        """
        ...

    def drain(self) -> list[Stamp]:
        """Wait until all has run; the stamps since the last drain, in order."""
        ...

    def close(self) -> None:
        """Stop the queue's thread; what has not run is dropped."""
        ...


@dataclass(frozen=True)
class _Item:
    label: Any
    work: Any
    enqueued_s: float
    duration_s: float | None = None
    overlapped_s: float = 0.0


class _WorkerThread:
    """One daemon thread that handles items in order and keeps the first error for the caller."""

    def __init__(self, name: str, handle: Callable[[_Item], None]) -> None:
        self._handle = handle
        self._items: standard_queue.SimpleQueue[_Item | None] = standard_queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: _Item) -> None:
        self.raise_error()
        self._items.put(item)

    def wait(self) -> None:
        """Return when everything put so far has been handled; raise its first error."""
        self._items.put(_Item(None, self._idle.release, 0.0))
        self._idle.acquire()
        self.raise_error()

    def raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        self._items.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            if item.work == self._idle.release:
                item.work()
            elif self._error is None:  # after an error the rest of the step is dropped
                try:
                    self._handle(item)
                except BaseException as error:  # noqa: BLE001 - it is raised again by the caller
                    self._error = error


class AsynchronousQueue:
    """XLA's own queue: items are dispatched at once, and a watcher stamps when they are done.

    An item's start is taken as the end of the one before it or its dispatch, whichever is later:
    what it would be on a device that runs one item at a time.
    """

    def __init__(self) -> None:
        self._stamps: list[Stamp] = []
        self._previous_end_s = 0.0
        self._watcher = _WorkerThread("jaxmorph-watcher", self._watch)

    def enqueue(
        self,
        label: Any,
        work: Work,
        duration_s: float | None = None,
        overlapped_s: float = 0.0,
    ) -> None:
        """Dispatch now; the duration is the device's own."""
        del duration_s, overlapped_s
        dispatched_s = time.monotonic()
        arrays = work()
        if label is not None:
            self._watcher.put(_Item(label, arrays, dispatched_s))

    def _watch(self, item: _Item) -> None:
        jax.block_until_ready(item.work)
        end_s = time.monotonic()
        self._stamps.append(Stamp(item.label, max(self._previous_end_s, item.enqueued_s), end_s))
        self._previous_end_s = end_s

    def drain(self) -> list[Stamp]:
        """Wait until all dispatched items are done."""
        self._watcher.wait()
        stamps, self._stamps = self._stamps, []
        return stamps

    def close(self) -> None:
        """Stop the watcher."""
        self._watcher.close()


class PacedQueue:
    """One worker that makes each op last as long as on the accelerator it stands for.

    The queue's clock is carried: an op starts when the item before it ended or when it was
    enqueued, runs its real (small) computation, and is held until start + duration, so that late
    wake-ups don't add up. An item without a duration, a transfer, lasts as long as it takes, less
    `overlapped_s`: what moving the bytes costs this machine's processors, an accelerator's copy
    engines would do beside the next op, and so it runs into that op's hold. Waiting for the peer
    is charged in full. Time that the holds can't take up is charged too: an op never ends before
    it has really run.
    """

    def __init__(self) -> None:
        self._stamps: list[Stamp] = []
        self._previous_end_s = 0.0
        self._worker = _WorkerThread("jaxmorph-paced-queue", self._run)

    def enqueue(
        self,
        label: Any,
        work: Work,
        duration_s: float | None = None,
        overlapped_s: float = 0.0,
    ) -> None:
        """Add an item; the caller doesn't wait."""
        self._worker.put(_Item(label, work, time.monotonic(), duration_s, overlapped_s))

    def _run(self, item: _Item) -> None:
        began_s = time.monotonic()
        jax.block_until_ready(item.work())
        if item.label is None:
            return
        start_s = max(self._previous_end_s, item.enqueued_s)
        end_s = time.monotonic()
        if item.duration_s is None:
            end_s = start_s + max(0.0, end_s - began_s - item.overlapped_s)
        else:
            end_s = max(end_s, start_s + item.duration_s)
            sleep_until(end_s)
        self._stamps.append(Stamp(item.label, start_s, end_s))
        self._previous_end_s = end_s

    def drain(self) -> list[Stamp]:
        """Wait until all enqueued items have run."""
        self._worker.wait()
        stamps, self._stamps = self._stamps, []
        return stamps

    def close(self) -> None:
        """Stop the worker."""
        self._worker.close()


def sleep_until(deadline_s: float) -> None:
    """Sleep until a time of the monotonic clock."""
    remaining_s = deadline_s - time.monotonic()
    if remaining_s > 0:
        time.sleep(remaining_s)
