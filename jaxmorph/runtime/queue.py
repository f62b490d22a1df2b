"""A rank's in-order queue: XLA's own, or a paced one that stands for a slower accelerator.

Ops and direct transfers of a step go through the rank's queue in the order of its program, as
kernels go through a GPU's stream: an item that waits blocks all items behind it (head-of-line
blocking). The queue stamps when each labelled item ran.
"""

import queue as standard_queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxmorph.progress import Silence, Stall, StalledError, progress
from jaxmorph.runtime.routes import Moved
from jaxmorph.schedule.ops import Op, OpKind

Work = Callable[[], Any]
TransferWork = Callable[[float], Moved]


@dataclass(frozen=True)
class Stamp:
    """When an item ran, or a message was in flight, in seconds of the monotonic clock."""

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
        host_copy_bytes_per_s: Speed of the accelerator's copies to host memory and back; None: as
            fast as this machine's.
        sends_take_compute: Whether a delegated message occupies its sender's compute while it is on
            the link, as an accelerator's own send does when it runs beside other kernels.
    """

    duration_s: Mapping[OpKind, float] = field(default_factory=dict)
    host_copy_bytes_per_s: float | None = None
    sends_take_compute: bool = False

    @classmethod
    def of_stage(
        cls,
        forward_ms: float,
        backward_input_ms: float,
        backward_weight_ms: float,
        num_chunks: int = 1,
    ) -> "Pace":
        """The pace of a stage with these durations, split evenly over its chunks.

        A full backward lasts as long as both its parts.
        """
        stage_ms = {
            OpKind.F: forward_ms,
            OpKind.B: backward_input_ms,
            OpKind.W: backward_weight_ms,
            OpKind.BW: backward_input_ms + backward_weight_ms,
        }
        return cls({kind: time_ms / num_chunks / 1000 for kind, time_ms in stage_ms.items()})

    def of(self, op: Op) -> float | None:
        """Seconds that an op lasts; None: as long as it takes."""
        duration_s = self.duration_s.get(op.kind)
        return None if duration_s is None else op.group * duration_s


@dataclass(frozen=True)
class _Item:
    label: Any
    work: Callable[..., Any]
    enqueued_s: float
    duration_s: float | None = None
    is_transfer: bool = False


_CLOSING_S = 1.0
_LOOK_S = 0.5
_ERRORS_S = 1.0  # grace for the error of an item that is itself waiting, which says more
_MOST = 0.5  # share of a wait's timeout: an op that holds the queue this long is its cause
_UNTIMED = "an item that is not timed"


class DeviceQueue(ABC):
    """Runs work in order; its own thread runs the work or watches it end.

    The thread keeps its first error for the caller. A restart begins a new generation: items and
    errors of earlier generations are dropped.
    """

    _thread_name: str

    def __init__(self) -> None:
        self._stamps: list[Stamp] = []
        self._previous_end_s = 0.0
        self._items: standard_queue.SimpleQueue[tuple[int, _Item] | Callable[[], None] | None] = (
            standard_queue.SimpleQueue()
        )
        self._generation = 0
        self._at: tuple[Any, float] | None = None  # an item's label, and since when it runs
        self._error: tuple[int, BaseException] | None = None  # with its generation
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=self._thread_name, daemon=True)
        self._thread.start()

    @abstractmethod
    def enqueue(self, label: Any, work: Work, duration_s: float | None = None) -> None:
        """Add an op or other work.

        Args:
            label: The stamp's label; None for work that is not timed.
            work: Dispatches the item and returns arrays that are ready when it has run.
            duration_s: How long a paced queue makes the op last; None: as long as it takes.
        """

    @abstractmethod
    def enqueue_transfer(self, label: Any, work: TransferWork) -> None:
        """Add a transfer; its work gets the time when the queue came to it."""

    @abstractmethod
    def enqueue_after(self, work: Callable[[float], None]) -> None:
        """Call `work` once all earlier items are over; `work` must not take long.

        It gets the time when they ended, by the queue's clock.
        """

    @abstractmethod
    def enqueue_wait(self, wait: Callable[[], float]) -> None:
        """Delay later items until something beside the queue has ended.

        `wait` blocks until then and returns the time when it ended.
        """

    @abstractmethod
    def _handle(self, item: _Item) -> None:
        """Run or watch an item, on the queue's thread."""

    def raise_error(self) -> None:
        """Raise the queue's first error, if there is one; doesn't wait."""
        if self._error is not None and self._error[0] == self._generation:
            raise self._error[1]

    def cause_of(self, error: BaseException) -> BaseException:
        """The queue's own error, if an earlier item has failed; else `error`.

        An op that reads a missing message fails at its dispatch, and its error doesn't say why the
        message is missing.
        """
        is_over = threading.Event()
        self._items.put(is_over.set)
        is_over.wait(_ERRORS_S)
        found = self._error
        return found[1] if found is not None and found[0] == self._generation else error

    def stall(self, error: Exception, timeout_s: float) -> Stall | None:
        """What this rank's device has stalled at, if that is why a wait failed.

        Ranks wait for each other in circles. So a rank whose own device has stalled may be the
        first to find that a message has not come, or that its peer is gone.

        Args:
            error: The wait's error.
            timeout_s: How long a wait may last.
        """
        label, since_s = self._at or (None, 0.0)
        lasts_s = time.monotonic() - since_s
        # Transfers wait for other ranks; ops wait for nobody.
        if not isinstance(label, Op) or lasts_s < _MOST * timeout_s:
            return None
        return Stall(lasts_s, f"its queue is at {label}; so it waited in vain: {error}")

    def drain(self, timeout_s: float = 60.0) -> list[Stamp]:
        """Wait until all items have run; returns the stamps of labelled items since the last drain.

        After an error each call raises that error until a restart.

        Args:
            timeout_s: How long this rank may go without progress, by its stamps.

        Raises:
            StalledError: If it makes no progress for longer; the message names the item.
        """
        self.await_items(timeout_s)
        stamps, self._stamps = self._stamps, []
        return stamps

    def await_items(self, timeout_s: float = 60.0) -> None:
        """Wait until all items have run; raises as `drain`."""
        is_over = threading.Event()
        self._items.put(is_over.set)
        self._await(is_over, timeout_s)
        self.raise_error()

    def _await(self, is_over: threading.Event, timeout_s: float) -> None:
        progress.stamp("waits for its queue")
        label, _ = self._at or (None, 0.0)  # what was dispatched last may be far behind it
        progress.stamp_queue(label)
        silence = Silence(progress.stamps, time.monotonic())
        while not is_over.wait(_LOOK_S):
            silence = silence.after(progress.stamps, time.monotonic())
            if silence.lasts_s > timeout_s + _ERRORS_S:
                raise StalledError(Stall(silence.lasts_s, progress.in_words()))
        progress.stamp_queue(None)

    def restart(self) -> None:
        """Drop items that have not begun, and the error; doesn't wait for the current item."""
        self._generation += 1
        self._stamps = []

    def close(self) -> None:
        """Stop the queue's thread; items that have not begun are dropped."""
        self._closed = True
        self._items.put(None)
        self._thread.join(_CLOSING_S)  # briefly: its item may hang with a dead peer

    def _put(self, item: _Item) -> None:
        self.raise_error()
        self._items.put((self._generation, item))

    def _run(self) -> None:
        while (found := self._items.get()) is not None:
            if not isinstance(found, tuple):
                if not self._closed:
                    found()
                continue
            generation, item = found
            failed = self._error is not None and self._error[0] == generation
            if generation == self._generation and not failed and not self._closed:
                progress.stamp_queue(item.label or _UNTIMED)
                self._at = item.label, time.monotonic()
                try:
                    self._handle(item)
                except BaseException as error:  # raised again by the caller; the rest is dropped
                    self._error = generation, error
                self._at = None


class AsynchronousQueue(DeviceQueue):
    """XLA's own queue: items are dispatched at once, and a watcher stamps when they are done.

    An item starts, by its stamp, at its dispatch or at the end of the item before, whichever is
    later, as on a device that runs one item at a time.
    """

    _thread_name = "jaxmorph-watcher"

    def enqueue(self, label: Any, work: Work, duration_s: float | None = None) -> None:
        """Dispatch now; the duration is the device's own."""
        del duration_s
        dispatched_s = time.monotonic()
        arrays = work()
        if label is not None:
            self._put(_Item(label, lambda: arrays, dispatched_s))

    def enqueue_transfer(self, label: Any, work: TransferWork) -> None:
        """Dispatch now; on CPUs this returns when the peer has come to the transfer.

        The watcher checks which message came. An emulated link blocks the dispatching thread, and
        with it all later items.
        """
        dispatched_s = time.monotonic()
        moved = work(dispatched_s)
        if moved.over_s is not None:
            sleep_until(moved.over_s)
        self._put(_Item(label, moved.checked, dispatched_s))

    def enqueue_after(self, work: Callable[[float], None]) -> None:
        """Let the watcher call `work` after the items before."""
        self._put(_Item(None, work, 0.0))

    def enqueue_wait(self, wait: Callable[[], float]) -> None:
        """Wait now, before anything else is dispatched."""
        wait()

    def _handle(self, item: _Item) -> None:
        stamps = self._stamps  # before it waits: a restart replaces the list
        if item.label is None:
            item.work(self._previous_end_s)
            return
        jax.block_until_ready(item.work())
        end_s = time.monotonic()
        stamps.append(Stamp(item.label, max(self._previous_end_s, item.enqueued_s), end_s))
        self._previous_end_s = end_s


class PacedQueue(DeviceQueue):
    """One worker that makes each op last as long as on the accelerator it stands for.

    The queue's clock is carried from item to item, so late wake-ups don't add up. An op starts when
    the item before it ended or when it was enqueued, whichever is later. It runs its real (small)
    computation and is held until start + duration.

    A transfer ends when the later of its two ends has come to it, by these clocks, or when its
    emulated link lets it pass. Waiting for a peer or a link blocks all items behind it. Moving the
    bytes takes no time of its own, as an accelerator's copy engines move them beside the next op:
    it runs within that op's hold. If it outlasts the hold, the op ends later, and its stamp starts
    later too, so that the stamp shows only the op's own time.

    Both ends use this machine's monotonic clock.
    """

    _thread_name = "jaxmorph-paced-queue"

    def __init__(self) -> None:
        self._follows_transfer = False
        super().__init__()

    def enqueue(self, label: Any, work: Work, duration_s: float | None = None) -> None:
        """Add an op or other work; the caller doesn't wait."""
        self._put(_Item(label, work, time.monotonic(), duration_s))

    def enqueue_transfer(self, label: Any, work: TransferWork) -> None:
        """Add a transfer; the caller doesn't wait."""
        self._put(_Item(label, work, time.monotonic(), is_transfer=True))

    def enqueue_after(self, work: Callable[[float], None]) -> None:
        """Let the worker call `work` between two items."""
        self.enqueue(None, lambda: work(self._previous_end_s))

    def enqueue_wait(self, wait: Callable[[], float]) -> None:
        """Let the worker wait; later items start at the returned time or later."""
        self.enqueue(None, lambda: self._not_before(wait()))

    def _not_before(self, time_s: float) -> None:
        self._previous_end_s = max(self._previous_end_s, time_s)

    def _handle(self, item: _Item) -> None:
        stamps = self._stamps  # before it waits: a restart replaces the list
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
        """Returns when the op is over, and the op's own duration."""
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
