"""Proves by replay that a step completes at whichever transfer a link's direct path fails.

Up to that transfer the replay is that of `check`. Then the transfer fails; the source sends again
what the destination's count doesn't cover; and this and all later messages of the link go through
slots, while both ends keep their positions in the order of their queues. A pair that fails may have
come at neither end, at one or at both; it and all later pairs are a send and then a receive.

An order that completes with rendezvous also completes with one slot: consider the first unfinished
instruction in the common order of the rendezvous. If it is a send, all earlier messages of its
channel have been received, so a slot is free; if it is a receive, its send comes before it. So it
can run. Pairs keep to that, as if both sends came before both receives. The replay tests it, and
the counts.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, product

from jaxmorph.program.check import ProgramError
from jaxmorph.program.instructions import (
    Channel,
    Instruction,
    Move,
    RankInstructions,
    Receive,
    Send,
    SendReceive,
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

    def due(self) -> Sequence[Transfer]:
        """The link's next transfer, or pair, if both its ends have reached it."""
        one, other = (_direct_move(self.head(rank), self.link) for rank in self.link)
        return () if one is None or other != one.other_end else _transfers(one)

    def meet(self, transfers: Sequence[Transfer]) -> None:
        """Completes the link's next transfer, or pair, over a healthy path."""
        for rank in self.link:
            self.positions[rank] += 1
        for transfer in transfers:
            channel = channel_of(transfer)
            self.sent.setdefault(channel, []).append(transfer)
            self.taken.setdefault(channel, []).append(transfer)

    def fail(self, transfers: Sequence[Transfer], come: Collection[Transfer]) -> None:
        """Fails the link's next transfer, or pair, and switches the link.

        Sources have kept their outputs, so only what destinations have received matters.
        """
        self.has_switched = True
        self.programs = [
            _without_pairs(program, self.link, position)
            for program, position in zip(self.programs, self.positions, strict=True)
        ]
        for transfer in transfers:
            channel = channel_of(transfer)
            self.sent.setdefault(channel, []).append(transfer)
            self.positions[transfer.source] += 1
        for transfer in transfers:
            channel = channel_of(transfer)
            taken = self.taken.setdefault(channel, [])
            if transfer in come:
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
        if not isinstance(head, Move):
            return True
        if isinstance(head, SendReceive) or self._meets(head):
            is_of_link = _link(head, rank) == self.link
            return not is_of_link and self.head(head.peer) == head.other_end
        waiting = self.in_slots.get(channel_of(head.transfer), ())
        if isinstance(head, Receive):
            return bool(waiting) and waiting[0] == head.transfer
        return head.route == "delegated" or len(waiting) < self.slots

    def _do(self, head: Instruction, rank: int) -> None:
        self.positions[rank] += 1
        if isinstance(head, SendReceive) or (isinstance(head, Move) and self._meets(head)):
            self.positions[head.peer] += 1
            return
        if not isinstance(head, Move):
            return
        transfer, channel = head.transfer, channel_of(head.transfer)
        if isinstance(head, Send):
            self.in_slots.setdefault(channel, deque()).append(transfer)
            self.sent.setdefault(channel, []).append(transfer)
        else:
            self.taken.setdefault(channel, []).append(self.in_slots[channel].popleft())

    def _meets(self, step: Send | Receive) -> bool:
        """Whether a transfer is a rendezvous now."""
        is_switched = self.has_switched and step.transfer.link == self.link
        return step.route == "direct" and not is_switched


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
        transfers = whole.due()
        if not transfers:
            _require_complete(whole, "no transfer")
            return replayed
        numbers = range(len(transfers) + 1)
        for come in chain.from_iterable(combinations(transfers, number) for number in numbers):
            broken = _copy(whole)
            broken.fail(transfers, come)
            broken.run()
            after, had_come = (" and ".join(map(str, each)) for each in (transfers, come))
            _require_complete(broken, f"{after} (had come: {had_come or 'nothing'})")
            replayed += 1
        whole.meet(transfers)


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


def _direct_move(step: Instruction | None, link: Link) -> Move | None:
    """The instruction, if it is a direct transfer of the link, or a pair."""
    if not isinstance(step, Move) or step.route != "direct":
        return None
    return step if _transfers(step)[0].link == link else None


def _transfers(step: Move) -> Sequence[Transfer]:
    return (step.sent, step.received) if isinstance(step, SendReceive) else (step.transfer,)


def _link(step: Move, rank: int) -> Link:
    return Link.of(step.peer, rank)


def _without_pairs(program: RankInstructions, link: Link, start: int) -> RankInstructions:
    """From a position on, each pair of the link is a send and a receive."""

    def single(step: Instruction) -> Iterator[Instruction]:
        if isinstance(step, SendReceive) and step.sent.link == link:
            yield from (Send(step.sent), Receive(step.received))
        else:
            yield step

    rest = chain.from_iterable(map(single, program.instructions[start:]))
    return replace(program, instructions=(*program.instructions[:start], *rest))


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
