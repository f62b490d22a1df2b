"""A step on paper in which every message has a delay of its own, and ranks may change their order.

Each rank has a host, which hands units to the rank's in-order queue as a run's does: ahead of time
while it follows the plan, one by one once it has left it (`schedule.online`). Direct transfers are
rendezvous that hold both queues; a delegated send takes a slot when its unit is handed over, and
the slot is free again when the receiver's host takes the message.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from jaxmorph.program.channels import Channel, channel_of
from jaxmorph.program.check import ProgramError
from jaxmorph.program.instructions import Instruction, RankProgram, Receive, Run, Send, Transfer
from jaxmorph.program.units import Unit, Units, units_of
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.memory import StageMemory
from jaxmorph.schedule.online import NEVER_MS, Leeway, OnlineOrder
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.timeline import Timeline

Delays = Callable[[Transfer, float], float]
"""How long a message takes, milliseconds, given when it was sent."""


def replay_online(
    programs: Sequence[RankProgram],
    costs: StageCosts,
    delay_ms: Delays,
    slots: Mapping[Channel, int] | None = None,
    *,
    left_plan: bool = False,
) -> Timeline:
    """Runs lowered programs on paper, each rank with the leeway that it has.

    Args:
        programs: One program per rank, in rank order, with one chunk; without leeway a rank keeps
            to its order.
        costs: Durations of the ops, milliseconds.
        delay_ms: Each message's delay; asked once for each, in the order of sending.
        slots: How many delegated messages a channel holds; a channel that isn't named, any number.
        left_plan: Whether ranks with leeway choose their order from the first op on.

    Returns:
        Start and end of every op, in the order in which they ran.

    Raises:
        ProgramError: The ranks wait for each other for ever.
    """
    step = _Step(costs, delay_ms, slots or {})
    step.ranks = [_Rank(program, step, left_plan) for program in programs]
    for rank in step.ranks:
        step.wake(0.0, rank)
    while step.events:
        now_ms, _, number = heappop(step.events)
        step.ranks[number].look(now_ms)
    stuck = [str(rank.program.rank) for rank in step.ranks if not rank.is_done]
    if stuck:
        raise ProgramError(f"deadlock: rank {', '.join(stuck)} can't go on")
    return Timeline(
        orders=tuple(tuple(rank.ops) for rank in step.ranks),
        start_ms=tuple(np.array(rank.starts_ms, np.float64) for rank in step.ranks),
        end_ms=tuple(np.array(rank.ends_ms, np.float64) for rank in step.ranks),
    )


@dataclass
class _Step:
    """What the ranks share: the time, and the messages between them."""

    costs: StageCosts
    delay_ms: Delays
    slots: Mapping[Channel, int]
    ranks: list["_Rank"] = field(default_factory=list)
    events: list[tuple[float, int, int]] = field(default_factory=list)
    landed_ms: dict[Transfer, float] = field(default_factory=dict)
    channel_ms: dict[Channel, float] = field(default_factory=dict)
    in_use: Counter[Channel] = field(default_factory=Counter)
    at_rendezvous: dict[Transfer, "_Rank"] = field(default_factory=dict)
    asked: int = 0

    def wake(self, at_ms: float, rank: "_Rank") -> None:
        """Has a rank look again at a time."""
        self.asked += 1
        heappush(self.events, (at_ms, self.asked, rank.program.rank))

    def send(self, transfer: Transfer, now_ms: float) -> None:
        """A delegated message leaves; a channel delivers in the order of sending."""
        channel = channel_of(transfer)
        landed_ms = now_ms + self.delay_ms(transfer, now_ms)
        landed_ms = max(landed_ms, self.channel_ms.get(channel, 0.0))
        self.channel_ms[channel] = self.landed_ms[transfer] = landed_ms
        self.wake(landed_ms, self.ranks[transfer.destination])

    def take(self, transfer: Transfer, now_ms: float) -> None:
        """A receiver's host takes a message; its slot is free again."""
        self.in_use[channel_of(transfer)] -= 1
        self.wake(now_ms, self.ranks[transfer.source])

    def has_room(self, send: Send) -> bool:
        """Whether a message has a slot."""
        channel = channel_of(send.transfer)
        return self.in_use[channel] < self.slots.get(channel, NEVER_MS)


class _Rank:
    """One rank's host and its queue."""

    def __init__(self, program: RankProgram, step: _Step, left_plan: bool) -> None:
        self.program = program
        self.ops: list[Op] = []
        self.starts_ms: list[float] = []
        self.ends_ms: list[float] = []
        units = units_of(program)
        self._units = units.planned
        self._ending = deque(units.ending)
        self._order = online_order(program, units)
        self._order.has_left_plan = left_plan and OpKind.F in units.movable and self._is_free
        self._step = step
        self._queue: deque[Instruction] = deque()
        self._busy_until_ms = 0.0
        self._transfer: Transfer | None = None

    @property
    def is_done(self) -> bool:
        """Whether all has run."""
        return not (self._queue or self._ending or self._transfer) and self._order.planned is None

    @property
    def _is_free(self) -> bool:
        return self.program.leeway is not None

    def look(self, now_ms: float) -> None:
        """Do whatever can be done now."""
        self._advance_queue(now_ms)
        while self._hand_over(now_ms):
            self._advance_queue(now_ms)

    def _hand_over(self, now_ms: float) -> bool:
        """The host gives the queue one more unit, or what ends the step."""
        if self._order.planned is None:
            return self._hand_over_ending(now_ms)
        is_idle = not self._queue and self._transfer is None
        dry_ms = self._busy_until_ms if is_idle else NEVER_MS
        index, until_ms = self._order.decide(
            now_ms, dry_ms, lambda index: self._can_run(self._units[index], now_ms)
        )
        if index is None:
            if now_ms < until_ms < NEVER_MS:
                self._step.wake(until_ms, self)
            return False
        self._order.take(index)
        unit = self._units[index]
        for receive in unit.receives:
            self._step.take(receive.transfer, now_ms)
        self._step.in_use.update(channel_of(send.transfer) for send in unit.sends)
        self._queue.extend(unit.steps)
        return True

    def _hand_over_ending(self, now_ms: float) -> bool:
        if not self._ending:
            return False
        step = self._ending[0]
        if isinstance(step, Receive) and step.route == "delegated":
            if not self._has_landed(step, now_ms):
                return False
            self._step.take(step.transfer, now_ms)
        else:
            self._queue.append(step)
        self._ending.popleft()
        return True

    def _can_run(self, unit: Unit, now_ms: float) -> bool:
        return all(self._has_landed(receive, now_ms) for receive in unit.receives) and all(
            self._step.has_room(send) for send in unit.sends
        )

    def _has_landed(self, receive: Receive, now_ms: float) -> bool:
        return self._step.landed_ms.get(receive.transfer, NEVER_MS) <= now_ms

    def _advance_queue(self, now_ms: float) -> None:
        """Runs what the queue can run until it is busy, waits for its peer, or is empty."""
        while self._queue and self._transfer is None and self._busy_until_ms <= now_ms:
            match self._queue.popleft():
                case Run(op):
                    self._run(op, now_ms)
                case Send(transfer, "direct") | Receive(transfer, "direct"):
                    self._meet(transfer, now_ms)
                case Send(transfer):
                    self._step.send(transfer, now_ms)
                case _:  # takes no time
                    pass

    def _run(self, op: Op, now_ms: float) -> None:
        self._busy_until_ms = now_ms + self._step.costs.duration_ms(self.program.rank, op.kind)
        self.ops.append(op)
        self.starts_ms.append(now_ms)
        self.ends_ms.append(self._busy_until_ms)
        if self._is_free:
            self._order.ran(op, now_ms, self._busy_until_ms)
        self._step.wake(self._busy_until_ms, self)

    def _meet(self, transfer: Transfer, now_ms: float) -> None:
        """Comes to a direct transfer, which holds both queues once both ends have."""
        peer = self._step.at_rendezvous.pop(transfer, None)
        if peer is None:
            self._step.at_rendezvous[transfer] = self
            self._transfer = transfer
            return
        over_ms = now_ms + self._step.delay_ms(transfer, now_ms)
        peer._transfer = None
        for rank in (self, peer):
            rank._busy_until_ms = over_ms
            self._step.wake(over_ms, rank)


def online_order(program: RankProgram, units: Units) -> OnlineOrder:
    """The order of a rank's units in a step, to be decided unit by unit.

    Args:
        program: The rank's; without leeway its order is the planned one.
    """
    items = [unit.op for unit in units.planned]
    if program.leeway is not None:
        return OnlineOrder(items, units.movable, program.leeway)
    nothing = (0.0,) * len(items)
    return OnlineOrder(items, frozenset(), Leeway(nothing, nothing, StageMemory(0, 0, 0)))
