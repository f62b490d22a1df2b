"""A rank's in-order queue: XLA's own, or a paced one that stands for a slower accelerator.

Everything a rank does in a step, ops and direct transfers alike, goes through its queue in the
order of its program, as kernels go through a GPU's stream: an item that waits holds up all behind
it (head-of-line blocking). The queue stamps when each item ran.
"""

import queue as standard_queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxmorph.runtime.routes import Moved
from jaxmorph.schedule.ops import OpKind

Work = Callable[[], Any]
TransferWork = Callable[[float], Moved]


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


@dataclass(frozen=True)
class Pace:
    """Durations of one stage's ops; an empty pace leaves ops as long as they take.

    Attributes:
        duration_s: Seconds per kind of op.
        host_copy_bytes_per_s: How fast the accelerator copies to host memory, and back; None: as
            fast as it does here.
    """

    duration_s: Mapping[OpKind, float] = field(default_factory=dict)
    host_copy_bytes_per_s: float | None = None

    @classmethod
    def of_stage(
        cls,
        forward_ms: float,
        backward_input_ms: float,
        backward_weight_ms: float,
        num_chunks: int = 1,
    ) -> "Pace":
        """The pace of a stage whose ops last this long; a full backward lasts as both its parts.

        An op of one of several chunks lasts its share of the stage's time.
        """
        stage_ms = {
            OpKind.F: forward_ms,
            OpKind.B: backward_input_ms,
            OpKind.W: backward_weight_ms,
            OpKind.BW: backward_input_ms + backward_weight_ms,
        }
        return cls({kind: time_ms / num_chunks / 1000 for kind, time_ms in stage_ms.items()})

    def of(self, kind: OpKind) -> float | None:
        """Seconds that an op of this kind lasts, or None: as long as it takes."""
        return self.duration_s.get(kind)


@dataclass(frozen=True)
class _Item:
    label: Any
    work: Callable[..., Any]
    enqueued_s: float
    duration_s: float | None = None
    is_transfer: bool = False


_CLOSING_S = 1.0


class _WorkerThread:
    """One daemon thread that handles items in order and keeps the first error for the caller."""

    def __init__(self, name: str, handle: Callable[[_Item], None]) -> None:
        self._handle = handle
        self._items: standard_queue.SimpleQueue[tuple[int, _Item] | Callable[[], None] | None] = (
            standard_queue.SimpleQueue()
        )
        self._life = 0
        self._idle = threading.Semaphore(0)
        self._error: tuple[int, BaseException] | None = None  # and in which life
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: _Item) -> None:
        self.raise_error()
        self._items.put((self._life, item))

    def wait(self) -> None:
        """Return when everything put so far has been handled; raise its first error."""
        self._items.put(self._idle.release)
        self._idle.acquire()
        self.raise_error()

    def raise_error(self) -> None:
        if self._error is not None and self._error[0] == self._life:
            raise self._error[1]

    def restart(self) -> None:
        """Drop what has not begun; an item that has may end as it likes."""
        self._life += 1

    def close(self) -> None:
        """Drop what has not begun; an item that waits for a dead peer is not waited for long."""
        self._closed = True
        self._items.put(None)
        self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        while (found := self._items.get()) is not None:
            if not isinstance(found, tuple):
                if not self._closed:
                    found()
                continue
            life, item = found
            failed = self._error is not None and self._error[0] == life
            if life == self._life and not failed and not self._closed:
                try:
                    self._handle(item)
                except BaseException as error:  # raised again by the caller; the rest is dropped
                    self._error = life, error


class DeviceQueue(ABC):
    """Runs work in order; a thread of its own follows it, or runs it."""

    _thread_name: str

    def __init__(self) -> None:
        self._stamps: list[Stamp] = []
        self._previous_end_s = 0.0
        self._worker = _WorkerThread(self._thread_name, self._handle)

    @abstractmethod
    def enqueue(self, label: Any, work: Work, duration_s: float | None = None) -> None:
        """Add an op, or bookkeeping.

        Args:
            label: What the stamp will name; None for bookkeeping that is not timed.
            work: Dispatches the item and returns arrays that are ready when it has run.
            duration_s: How long a paced queue makes the op last; None: as long as it takes.
        """

    @abstractmethod
    def enqueue_transfer(self, label: Any, work: TransferWork) -> None:
        """Add a transfer; its work runs this end, given when the queue came to it."""

    @abstractmethod
    def enqueue_after(self, work: Callable[[float], None]) -> None:
        """Have something done, beside the queue, once all that was added before is over.

        It is given when that was, by the queue's clock, and must not take long.
        """

    @abstractmethod
    def enqueue_wait(self, wait: Callable[[], float]) -> None:
        """Have nothing that is added later start before something beside the queue has ended.

        What is given waits until that is over, and says when it was.
        """

    @abstractmethod
    def _handle(self, item: _Item) -> None:
        """What the queue's thread does with an item."""

    def raise_error(self) -> None:
        """Raise what has gone wrong on the queue, if anything has; waits for nothing."""
        self._worker.raise_error()

    def drain(self) -> list[Stamp]:
        """Wait until all has run; the stamps since the last drain, in order.

        What has gone wrong is raised again and again until a restart: the rest is lost.
        """
        self._worker.wait()
        stamps, self._stamps = self._stamps, []
        return stamps

    def restart(self) -> None:
        """Drop what has not run, and forget what has gone wrong; waits for nothing."""
        self._worker.restart()
        self._stamps = []

    def close(self) -> None:
        """Stop the queue's thread; what has not run is dropped."""
        self._worker.close()


class AsynchronousQueue(DeviceQueue):
    """XLA's own queue: items are dispatched at once, and a watcher stamps when they are done.

    An item's start is taken as the end of the one before it or its dispatch, whichever is later:
    what it would be on a device that runs one item at a time.
    """

    _thread_name = "jaxmorph-watcher"

    def enqueue(self, label: Any, work: Work, duration_s: float | None = None) -> None:
        """Dispatch now; the duration is the device's own."""
        del duration_s
        dispatched_s = time.monotonic()
        arrays = work()
        if label is not None:
            self._worker.put(_Item(label, lambda: arrays, dispatched_s))

    def enqueue_transfer(self, label: Any, work: TransferWork) -> None:
        """Dispatch now; on CPU this returns when the peer has come.

        An emulated link holds up the thread that dispatches, and with it all that comes after.
        """
        dispatched_s = time.monotonic()
        moved = work(dispatched_s)
        if moved.over_s is not None:
            sleep_until(moved.over_s)
        self._worker.put(_Item(label, lambda: moved.value, dispatched_s))

    def enqueue_after(self, work: Callable[[float], None]) -> None:
        """Have the watcher do it, once it has seen all before."""
        self._worker.put(_Item(None, work, 0.0))

    def enqueue_wait(self, wait: Callable[[], float]) -> None:
        """Wait now, before anything else is dispatched."""
        wait()

    def _handle(self, item: _Item) -> None:
        stamps = self._stamps  # those of this life of the queue
        if item.label is None:
            item.work(self._previous_end_s)
            return
        jax.block_until_ready(item.work())
        end_s = time.monotonic()
        stamps.append(Stamp(item.label, max(self._previous_end_s, item.enqueued_s), end_s))
        self._previous_end_s = end_s


class PacedQueue(DeviceQueue):
    """One worker that makes each op last as long as on the accelerator it stands for.

    The queue has a clock of its own, which is carried from item to item so that late wake-ups
    don't add up. An op starts when the item before it ended or when it was enqueued, runs its real
    (small) computation, and is held until start + duration. A transfer ends when the later of its
    two ends has come to it, by these clocks, and where its link is emulated when that has let it
    pass: waiting for a peer or a link is charged in full and holds up everything behind. Moving the
    bytes, which an accelerator's copy engines do beside the next op, is not charged as such: it
    runs into that op's hold. What the hold can't take up is charged, as no op ends before it has
    really run, but not to the op: its stamp begins so much later that what it took itself is left.
    Both ends' clocks are this machine's monotonic one.
    """

    _thread_name = "jaxmorph-paced-queue"

    def __init__(self) -> None:
        self._follows_transfer = False
        super().__init__()

    def enqueue(self, label: Any, work: Work, duration_s: float | None = None) -> None:
        """Add an op or bookkeeping; the caller doesn't wait."""
        self._worker.put(_Item(label, work, time.monotonic(), duration_s))

    def enqueue_transfer(self, label: Any, work: TransferWork) -> None:
        """Add a transfer; the caller doesn't wait."""
        self._worker.put(_Item(label, work, time.monotonic(), is_transfer=True))

    def enqueue_after(self, work: Callable[[float], None]) -> None:
        """Have the worker do it, between two items."""
        self.enqueue(None, lambda: work(self._previous_end_s))

    def enqueue_wait(self, wait: Callable[[], float]) -> None:
        """Have the worker wait, and what follows start at the end it is told, if that is later."""
        self.enqueue(None, lambda: self._not_before(wait()))

    def _not_before(self, time_s: float) -> None:
        self._previous_end_s = max(self._previous_end_s, time_s)

    def _handle(self, item: _Item) -> None:
        stamps = self._stamps  # those of this life of the queue
        if item.label is None:
            item.work()
            return
        start_s = max(self._previous_end_s, item.enqueued_s)
        if item.is_transfer:
            end_s = self._move(item, start_s)
        else:
            end_s, took_s = self._hold(item, start_s)
            if self._follows_transfer:
                start_s = max(start_s, end_s - took_s)
        stamps.append(Stamp(item.label, start_s, end_s))
        self._previous_end_s, self._follows_transfer = end_s, item.is_transfer

    @staticmethod
    def _move(item: _Item, start_s: float) -> float:
        moved: Moved = item.work(start_s)
        jax.block_until_ready(moved.value)
        if moved.over_s is None:
            return max(start_s, moved.peer_arrived_s or 0.0)
        sleep_until(moved.over_s)
        return max(start_s, moved.over_s)

    @staticmethod
    def _hold(item: _Item, start_s: float) -> tuple[float, float]:
        """When the op is over, and what it takes of that itself."""
        began_s = time.monotonic()
        jax.block_until_ready(item.work())
        end_s = time.monotonic()
        took_s = end_s - began_s
        if item.duration_s is not None:
            took_s = max(took_s, item.duration_s)
            end_s = max(end_s, start_s + item.duration_s)
            sleep_until(end_s)
        return end_s, took_s


def sleep_until(deadline_s: float) -> None:
    """Sleep until a time of the monotonic clock."""
    remaining_s = deadline_s - time.monotonic()
    if remaining_s > 0:
        time.sleep(remaining_s)
