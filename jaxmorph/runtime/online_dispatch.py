"""Hands a rank's units to its queue in an order that is decided while the step runs.

The host hands over planned units ahead of time while their messages are there. When the queue is
about to run dry it asks `schedule.online` what to take in place of a unit that is late, and waits,
without using the processor, for whatever could be taken next.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from jaxmorph.program.instructions import Instruction, RankProgram, Transfer
from jaxmorph.program.online_replay import online_order
from jaxmorph.program.units import Unit, units_of
from jaxmorph.runtime.identity import TransferIdentity
from jaxmorph.runtime.queue import DeviceQueue
from jaxmorph.schedule.online import OnlineOrder
from jaxmorph.schedule.ops import Op
from jaxmorph.transport.doorbell import Doorbell, wait_for_any

_LEAD_S = 0.5e-3
"""How long before the queue runs dry its next unit is chosen: waking the host takes a moment."""

_CHECK_EVERY_S = 0.5

Enqueue = Callable[[Instruction], None]
Identify = Callable[[Transfer], TransferIdentity]


class LooksAhead(Protocol):
    """A route that says what has come and what has room (`runtime.delegated`)."""

    def has_come(self, identity: TransferIdentity) -> bool:
        """Whether a message is here."""
        ...

    def has_room(self, identity: TransferIdentity) -> bool:
        """Whether a message could be sent now."""
        ...

    def doorbell(self, identity: TransferIdentity) -> Doorbell:
        """What rings when either may have changed."""
        ...

    def look(self) -> None:
        """Raise what has gone wrong that a wait may depend on; waits for nothing."""
        ...


class _Ran(NamedTuple):
    """When a unit ran; None for what isn't an op."""

    op: Op | None
    start_s: float
    end_s: float


class _Planned(NamedTuple):
    """A unit on the queue, and how long it should take; None: nobody knows."""

    op: Op | None
    duration_s: float | None
    added_s: float


@dataclass
class _Work:
    """What has been handed to the queue, and how much of it has run.

    The queue's thread counts what has run; the host adds.
    """

    planned: list[_Planned] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    since_s: float = 0.0
    told: int = 0

    @property
    def finished(self) -> int:
        """How many units have run."""
        return len(self.ends_s)

    def add(self, op: Op | None, duration_s: float | None, now_s: float) -> None:
        """One more unit."""
        if self.is_over:
            self.since_s = max(self.since_s, now_s)
        self.planned.append(_Planned(op, duration_s, now_s))

    def finish(self, now_s: float) -> None:
        """One unit has run."""
        self.since_s = now_s
        self.ends_s.append(now_s)

    def newly_ran(self) -> Iterator[_Ran]:
        """The units that have run and haven't been told of."""
        while self.told < self.finished:
            at, self.told = self.told, self.told + 1
            op, _, added_s = self.planned[at]
            before_s = self.ends_s[at - 1] if at else 0.0
            yield _Ran(op, max(before_s, added_s), self.ends_s[at])

    @property
    def is_over(self) -> bool:
        """Whether all has run."""
        return self.finished == len(self.planned)

    @property
    def dry_s(self) -> float:
        """When it has all run, if units take what they should; infinite where nobody knows."""
        finished, since_s = self.finished, self.since_s
        left = [unit.duration_s for unit in self.planned[finished:]]
        known = [duration_s for duration_s in left if duration_s is not None]
        return since_s + sum(known) if len(known) == len(left) else float("inf")


@dataclass
class OnlineDispatcher:
    """Runs a rank's programs that have leeway.

    Attributes:
        timeout_s: How long to wait for anything at all that could run.
        wait: Waits for bells, given also a condition and a deadline.
        bell: Rings when the queue has run a unit that may change what is taken next.
    """

    queue: DeviceQueue
    route: LooksAhead
    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[Sequence[Doorbell], Callable[[], bool], float], bool] = wait_for_any
    bell: Doorbell = field(default_factory=Doorbell.create)

    def dispatch(self, program: RankProgram, enqueue: Enqueue, identify: Identify) -> None:
        """Hand over a step.

        Args:
            enqueue: Takes each instruction; what it waits for has been seen to be there.
            identify: Names a message of the step.

        Raises:
            TimeoutError: If for too long nothing came that could run.
            PeerGoneError: If a rank at the other end of a delegated link is gone.
            Exception: What has gone wrong on the queue, or with a copy into a slot.
        """
        units = units_of(program)
        step = _Step(self, units.planned, online_order(program, units), identify)
        for unit in step.chosen_units():
            for instruction in unit.instructions:
                enqueue(instruction)
            step.count(unit)
        for instruction in units.ending:
            enqueue(instruction)

    def close(self) -> None:
        """Give the bell back, once the queue is closed."""
        self.bell.close()


class _Awaited(NamedTuple):
    """What a rank waits for: more units that have run, messages, and room for messages."""

    finished: int
    missing: list[TransferIdentity]
    full: list[TransferIdentity]


class _Step:
    """One step's choices."""

    def __init__(
        self,
        own: OnlineDispatcher,
        units: Sequence[Unit],
        order: OnlineOrder,
        identify: Identify,
    ) -> None:
        self._own, self._units, self._order, self._identify = own, units, order, identify
        self._began_s = own.clock()
        self._work = _Work(since_s=self._began_s)
        self._is_choosing = False  # as of the last decision, for the queue's thread

    def chosen_units(self) -> Iterator[Unit]:
        """The units in the order to run them; waits where there is none to take."""
        while self._order.planned is not None:
            index, _ = self._decide()
            if index is None:
                awaited = self._awaited()
                index, until_s = self._decide()  # what has come since then is not awaited
                if index is None:
                    self._wait_until(until_s, awaited)
                    continue
            self._order.take(index)
            yield self._units[index]

    def count(self, unit: Unit) -> None:
        """A unit stands on the queue."""
        duration_ms = None if unit.op is None else self._order.duration_ms(unit.op)
        duration_s = None if duration_ms is None else duration_ms / 1e3
        self._work.add(unit.op, duration_s, self._own.clock())
        self._own.queue.notify(self._finish)

    def _decide(self) -> tuple[int | None, float]:
        """The unit to take now; failing that None, and when to ask again at the latest."""
        for op, start_s, end_s in self._work.newly_ran():
            if op is not None:
                self._order.ran(op, self._since_began_ms(start_s), self._since_began_ms(end_s))
        dry_ms = self._since_began_ms(self._dry_s)
        now_ms = self._since_began_ms(self._own.clock())
        index, until_ms = self._order.decide(now_ms, dry_ms, self._can_run)
        self._is_choosing = self._order.is_choosing
        return index, self._began_s + until_ms / 1e3

    @property
    def _dry_s(self) -> float:
        """When the queue has nothing left: what is chosen, is so ahead of that.

        Nothing is found late while the queue still runs: an op may take longer than it should.
        """
        work = self._work
        if self._order.is_choosing:
            return work.dry_s - _LEAD_S
        return work.since_s if work.is_over else float("inf")

    def _finish(self) -> None:
        """Count a unit, on the queue's thread; the host is woken only where it makes a difference.

        As long as nothing is late it waits for messages, and for the end of all that it has handed
        over: being woken for each unit would cost it, and the queue's thread, a moment each time.
        """
        self._work.finish(self._own.clock())
        if self._work.is_over or self._is_choosing:
            self._own.bell.ring()

    def _since_began_ms(self, time_s: float) -> float:
        return 1e3 * (time_s - self._began_s)

    def _can_run(self, index: int) -> bool:
        unit = self._units[index]
        return all(map(self._own.route.has_come, self._received(unit))) and all(
            map(self._own.route.has_room, self._sent(unit))
        )

    def _received(self, unit: Unit) -> Iterator[TransferIdentity]:
        return (self._identify(receive.transfer) for receive in unit.receives)

    def _sent(self, unit: Unit) -> Iterator[TransferIdentity]:
        return (self._identify(send.transfer) for send in unit.sends)

    def _awaited(self) -> _Awaited:
        """What keeps the units that may be next from being taken."""
        finished, route = self._work.finished, self._own.route
        units = [self._units[index] for index in self._candidates()]
        missing = [m for unit in units for m in self._received(unit) if not route.has_come(m)]
        full = [m for unit in units for m in self._sent(unit) if not route.has_room(m)]
        return _Awaited(finished, missing, full)

    def _wait_until(self, until_s: float, awaited: _Awaited) -> None:
        """Wait for a time, the end of a unit, or whatever is awaited."""
        own, (finished, missing, full) = self._own, awaited
        own.queue.raise_error()
        own.route.look()
        self._give_up_in_time(missing or full)

        def has_changed() -> bool:
            return (
                self._work.finished != finished
                or any(map(own.route.has_come, missing))
                or any(map(own.route.has_room, full))
            )

        bells = [own.bell, *map(own.route.doorbell, (*missing, *full))]
        own.wait(bells, has_changed, min(until_s, own.clock() + _CHECK_EVERY_S))

    def _candidates(self) -> list[int]:
        """The planned unit, and those that may run in its place."""
        planned = self._order.planned
        return [] if planned is None else list(dict.fromkeys((planned, *self._order.heads())))

    def _give_up_in_time(self, awaited: Sequence[TransferIdentity]) -> None:
        idle_s = self._own.clock() - self._work.dry_s
        if idle_s > self._own.timeout_s:
            names = ", ".join(map(str, awaited))
            raise TimeoutError(f"waited for {self._own.timeout_s:g} s for {names}")
