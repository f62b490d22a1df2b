"""Proves by replay that a step completes at whichever transfer a link's direct path fails.

Up to that transfer the replay is that of `check`. Then the transfer fails; the source sends again
what the destination's count doesn't cover; and this and all later messages of the link go through
slots, while both ends keep their positions in the order of their queues.

An order that completes with rendezvous also completes with one slot: consider the first unfinished
instruction in the common order of the rendezvous. If it is a send, all earlier messages of its
channel have been received, so a slot is free; if it is a receive, its send comes before it. So it
can run. The replay tests that, and the counts.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from jaxmorph.program.check import ProgramError
from jaxmorph.program.instructions import (
    Channel,
    Instruction,
    RankInstructions,
    Receive,
    Send,
    Transfer,
    channel_of,
)
from jaxmorph.records import Link


@dataclass
class _Replay:
    """The positions of all ranks, and the messages under way."""

    programs: Sequence[RankInstructions]
    link: Link
    slots: int
    positions: list[int] = field(init=False)
    in_slots: dict[Channel, deque[Transfer]] = field(default_factory=dict)
    sent: dict[Channel, list[Transfer]] = field(default_factory=dict)
    taken: dict[Channel, list[Transfer]] = field(default_factory=dict)
    has_switched: bool = False

    def __post_init__(self) -> None:
        self.positions = [0] * len(self.programs)

    def head(self, rank: int) -> Instruction | None:
        """The rank's next instruction."""
        steps = self.programs[rank].instructions
        return steps[self.positions[rank]] if self.positions[rank] < len(steps) else None

    def run(self) -> None:
        """Runs as far as possible without the link's next transfer, until the link has switched.

        The ranks reach the same positions however they take turns.
        """
        moved = True
        while moved:
            moved = sum(map(self._advance, range(len(self.programs)))) > 0

    def due(self) -> Transfer | None:
        """The link's next transfer, if both its ends have reached it."""
        one, other = (_direct_transfer(self.head(rank), self.link) for rank in self.link)
        return one if one == other else None

    def meet(self, transfer: Transfer) -> None:
        """Completes the link's next transfer over a healthy path."""
        for rank in self.link:
            self.positions[rank] += 1
        channel = channel_of(transfer)
        self.sent.setdefault(channel, []).append(transfer)
        self.taken.setdefault(channel, []).append(transfer)

    def fail(self, transfer: Transfer, *, has_come: bool) -> None:
        """Fails the link's next transfer and switches the link.

        The source has kept the output, so only what the destination has received matters.
        """
        channel = channel_of(transfer)
        self.has_switched = True
        self.sent.setdefault(channel, []).append(transfer)
        self.positions[transfer.source] += 1
        taken = self.taken.setdefault(channel, [])
        if has_come:
            taken.append(transfer)
            self.positions[transfer.destination] += 1
        uncovered = self.sent[channel][len(taken) :]
        self.in_slots.setdefault(channel, deque()).extend(uncovered)

    def _advance(self, rank: int) -> bool:
        moved = False
        while (head := self.head(rank)) is not None and self._can_run(head, rank):
            self._do(head, rank)
            moved = True
        return moved

    def _can_run(self, head: Instruction, rank: int) -> bool:
        if not isinstance(head, Send | Receive):
            return True
        if self._meets(head):
            return head.transfer.link != self.link and self._peer_is_there(head, rank)
        waiting = self.in_slots.get(channel_of(head.transfer), ())
        if isinstance(head, Receive):
            return bool(waiting) and waiting[0] == head.transfer
        return head.route == "delegated" or len(waiting) < self.slots

    def _do(self, head: Instruction, rank: int) -> None:
        self.positions[rank] += 1
        if not isinstance(head, Send | Receive):
            return
        transfer, channel = head.transfer, channel_of(head.transfer)
        if self._meets(head):
            self.positions[_peer(transfer, rank)] += 1
        elif isinstance(head, Send):
            self.in_slots.setdefault(channel, deque()).append(transfer)
            self.sent.setdefault(channel, []).append(transfer)
        else:
            self.taken.setdefault(channel, []).append(self.in_slots[channel].popleft())

    def _meets(self, step: Send | Receive) -> bool:
        """Whether a transfer is a rendezvous now."""
        is_switched = self.has_switched and step.transfer.link == self.link
        return step.route == "direct" and not is_switched

    def _peer_is_there(self, head: Send | Receive, rank: int) -> bool:
        other = self.head(_peer(head.transfer, rank))
        return isinstance(other, Send | Receive) and other.transfer == head.transfer


def check_switch(programs: Sequence[RankInstructions], link: Link, slots: int = 1) -> int:
    """Replays a step for every direct transfer of a link that may fail, received or not.

    Args:
        programs: One per rank, in rank order, which pass `check`.
        slots: How many messages of a channel may be under way after the switch.

    Returns:
        The number of failures replayed; 0 if the link isn't direct.

    Raises:
        ProgramError: After a failure, the ranks deadlock or a message is lost, received twice or
            out of order.
    """
    whole, replayed = _Replay(programs, link, slots), 0
    while True:
        whole.run()
        transfer = whole.due()
        if transfer is None:
            _require_complete(whole, "no transfer")
            return replayed
        for has_come in (False, True):
            broken = _copy(whole)
            broken.fail(transfer, has_come=has_come)
            broken.run()
            which = "which had come" if has_come else "which had not come"
            _require_complete(broken, f"{transfer}, {which},")
            replayed += 1
        whole.meet(transfer)


def check_every_switch(programs: Sequence[RankInstructions], slots: int = 1) -> int:
    """As `check_switch`, for every link alone."""
    ranks = range(len(programs))
    links = [Link(low, high) for low, high in product(ranks, ranks) if low < high]
    return sum(check_switch(programs, link, slots) for link in links)


def _copy(replay: _Replay) -> _Replay:
    copied = _Replay(replay.programs, replay.link, replay.slots)
    copied.positions = list(replay.positions)
    copied.in_slots = {channel: deque(waiting) for channel, waiting in replay.in_slots.items()}
    copied.sent = {channel: list(sent) for channel, sent in replay.sent.items()}
    copied.taken = {channel: list(taken) for channel, taken in replay.taken.items()}
    return copied


def _direct_transfer(step: Instruction | None, link: Link) -> Transfer | None:
    """The instruction's transfer, if it is a direct one of the link."""
    if not isinstance(step, Send | Receive) or step.route != "direct":
        return None
    return step.transfer if step.transfer.link == link else None


def _peer(transfer: Transfer, rank: int) -> int:
    return transfer.destination if transfer.source == rank else transfer.source


def _require_complete(replay: _Replay, after: str) -> None:
    """Checks that all ranks are done and every message was received once and in order."""
    stuck = [rank for rank in range(len(replay.programs)) if replay.head(rank) is not None]
    if stuck:
        waiting = ", ".join(f"rank {rank} waits at {replay.head(rank)}" for rank in stuck)
        raise ProgramError(f"link {replay.link} failed at {after} and nothing goes on: {waiting}")
    for channel, sent in replay.sent.items():
        taken = replay.taken.get(channel, [])
        if taken != sent:
            lost = Counter(sent) - Counter(taken)
            what = f"lost {', '.join(map(str, lost))}" if lost else "took messages out of order"
            raise ProgramError(f"link {replay.link} failed at {after} and {channel} {what}")
