"""How many messages of a channel can be in flight at once, and what fits into host memory.

A rank's host enqueues instructions ahead of time; only a delegated receive makes it wait. A send
takes its slot when it is enqueued and frees it when the receiver has the message. So the slots in
use are bounded by what the sender knows of the receiver's progress from the messages that it had to
wait for. One replay with vector clocks finds what it knows, which does not depend on durations.

With fewer slots the step still runs, unless the ranks then wait for each other: a send waits for a
slot, as `blocking.simulate_blocking` simulates.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxmorph.program.check import ProgramError
from jaxmorph.program.instructions import (
    Channel,
    Fetch,
    Instruction,
    Move,
    Offload,
    Payload,
    RankInstructions,
    Receive,
    Send,
    SendReceive,
    Transfer,
    channel_of,
)

FIRST_SLOTS = 2
"""Slots of each end of a channel, if a plan needs no more; any link may fail and be delegated."""

HANDOVER_SLOTS = 8
"""Slots of a direct channel whose link may be handed over in mid-step: with fewer its sends would
wait, on the queue, for as long as a slow link takes to bring acknowledgements back."""

_Clock = np.ndarray
"""int64 [ranks]: how many instructions each rank's host is known to have handled."""


def slots_needed(programs: Sequence[RankInstructions]) -> dict[Channel, int]:
    """For every delegated channel, the number of slots with which no send of a step ever waits.

    It is the largest number of messages sent but not received, under any timing of ops and links,
    rounded up to a power of two. It is enough at both ends.

    Raises:
        ProgramError: The ranks wait for each other for ever.
    """
    most: dict[Channel, int] = {}
    received = {program.rank: _received_by(program) for program in programs}
    sent: dict[Channel, int] = {}
    for transfer, knows in _sends(programs):
        channel = channel_of(transfer)
        sent[channel] = sent.get(channel, 0) + 1
        handled = int(knows[transfer.destination])
        positions = received[transfer.destination][channel]
        outstanding = sent[channel] - bisect_left(positions, handled)
        most[channel] = max(most.get(channel, 0), outstanding)
    return {channel: power_of_two(number) for channel, number in most.items()}


def handover_slots(programs: Iterable[RankInstructions]) -> dict[Channel, int]:
    """The slots of direct channels in a run whose links may be handed over."""
    every = (step for program in programs for step in program.instructions)
    direct = (step for step in every if isinstance(step, Move) and step.route == "direct")
    channels = {
        channel_of(step.received if isinstance(step, SendReceive) else step.transfer)
        for step in direct
    }
    return {each: HANDOVER_SLOTS for each in channels if each.payload is not Payload.TIED}


def most_slots(*needed: Mapping[Channel, int]) -> dict[Channel, int]:
    """For every channel, the most slots that any of several steps needs."""
    channels = dict.fromkeys(channel for slots in needed for channel in slots)
    return {channel: max(slots.get(channel, 0) for slots in needed) for channel in channels}


@dataclass(frozen=True)
class HostRoom:
    """The host memory that each rank has for slots and for offloaded stashes.

    A plan's delegated links share what a rank has; each other channel keeps `FIRST_SLOTS`, as its
    link may fail in any step.

    Attributes:
        slot_bytes: Bytes of one slot of each channel that may be delegated during the run.
        rank_bytes: For slots, one per rank; None: no limit.
        stash_bytes: For stashes, one per rank; None: no limit.
    """

    slot_bytes: dict[Channel, int]
    rank_bytes: tuple[int, ...] | None = None
    stash_bytes: tuple[int, ...] | None = None

    def holds(self, stash_bytes: Sequence[int]) -> bool:
        """Whether offloaded stashes of so many bytes fit."""
        rooms = self.stash_bytes or stash_bytes
        return all(away <= own for away, own in zip(stash_bytes, rooms, strict=True))

    def slots_wanted(self, needed: Mapping[Channel, int]) -> dict[Channel, int]:
        """What all channels would get without a limit: as many as needed, at least `FIRST_SLOTS`.

        A tied parameter's channel has one message a step, so `FIRST_SLOTS` is enough.
        """
        return {
            channel: FIRST_SLOTS
            if channel.payload is Payload.TIED
            else max(FIRST_SLOTS, needed.get(channel, 0))
            for channel in self.slot_bytes
        }

    def taken_bytes(self, slots: Mapping[Channel, int], num_ranks: int) -> tuple[int, ...]:
        """The bytes that each rank's ends of channels with so many slots take."""
        taken = [0] * num_ranks
        for channel, number in slots.items():
            for rank in channel.link:
                taken[rank] += number * self.slot_bytes.get(channel, 0)
        return tuple(taken)

    def short_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank lacks for the fewest slots; if none is above 0, some plan fits."""
        if self.rank_bytes is None:
            return ()
        least = self.taken_bytes(self.slots_wanted({}), len(self.rank_bytes))
        return tuple(taken - own for taken, own in zip(least, self.rank_bytes, strict=True))

    def slots_that_fit(
        self, needed: Mapping[Channel, int], also: Mapping[Channel, int] | None = None
    ) -> dict[Channel, int]:
        """The slots of all channels: as many as needed, or as fit.

        The channel with the most bytes on the rank that lacks the most is halved until all fit, or
        have the fewest.

        Args:
            needed: The slots that training steps need.
            also: Those that evaluations need, for example; they get only what training leaves.
        """
        slots = self._halved(self.slots_wanted(needed), self.slots_wanted({}))
        if also is None:
            return slots
        return self._halved(self.slots_wanted(most_slots(slots, also)), slots)

    def _halved(
        self, slots: dict[Channel, int], least: Mapping[Channel, int]
    ) -> dict[Channel, int]:
        """The slots, fewer where they don't fit, but nowhere fewer than `least`."""
        while self.rank_bytes is not None:
            taken = self.taken_bytes(slots, len(self.rank_bytes))
            short = [used - own for used, own in zip(taken, self.rank_bytes, strict=True)]
            rank = max(range(len(short)), key=short.__getitem__)
            own = [each for each in slots if rank in each.link and slots[each] > least[each]]
            if short[rank] <= 0 or not own:
                break
            slots[max(own, key=lambda each: slots[each] * self.slot_bytes[each])] //= 2
        return slots


def scarce_slots(given: Mapping[Channel, int], needed: Mapping[Channel, int]) -> dict[Channel, int]:
    """The slots of channels that have fewer than needed: their sends may wait."""
    pairs = ((channel, given.get(channel, number)) for channel, number in needed.items())
    return {channel: number for channel, number in pairs if number < needed[channel]}


def most_offloaded_bytes(program: RankInstructions, stash_bytes: int) -> int:
    """The most bytes of a rank's stashes in host memory at once.

    A stash counts from its offload to its fetch; that of one of V chunks counts 1/V.

    Args:
        stash_bytes: The stash of one microbatch, of all chunks together.
    """
    away = most = 0
    for step in program.instructions:
        if isinstance(step, Offload):
            away += 1
            most = max(most, away)
        elif isinstance(step, Fetch):
            away -= 1
    # One more: the host keeps its copy of a stash until the fetch has ended.
    most += any(isinstance(step, Fetch) for step in program.instructions)
    return -(-most * stash_bytes // program.num_chunks)


def power_of_two(number: int) -> int:
    """The number rounded up to a power of two, which `transport.slots` requires."""
    return 1 << max(number - 1, 0).bit_length()


def _received_by(program: RankInstructions) -> dict[Channel, list[int]]:
    """The positions at which a rank receives the delegated messages of each channel."""
    positions: dict[Channel, list[int]] = {}
    for position, step in enumerate(program.instructions):
        if isinstance(step, Receive) and step.route == "delegated":
            positions.setdefault(channel_of(step.transfer), []).append(position)
    return positions


@dataclass
class _Knowledge:
    """The progress of a rank's host and queue, and what each knows of all hosts."""

    program: RankInstructions
    host: _Clock
    queue: _Clock
    handled: int = 0
    queued: deque[tuple[Move, _Clock]] = field(default_factory=deque)

    @property
    def front(self) -> Move | None:
        return self.queued[0][0] if self.queued else None


def _sends(programs: Sequence[RankInstructions]) -> Iterator[tuple[Transfer, _Clock]]:
    """Every delegated send, in each host's order, with what its host knows at that time."""
    size = len(programs)
    ranks = [_Knowledge(program, np.zeros(size, int), np.zeros(size, int)) for program in programs]
    on_the_way: dict[Transfer, _Clock] = {}
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            for step in _advance_host(rank, on_the_way):
                moved = True
                if isinstance(step, Send) and step.route == "delegated":
                    yield step.transfer, rank.host.copy()
            moved |= _advance_queue(rank, ranks, on_the_way)
    if any(rank.queued or rank.handled < len(rank.program.instructions) for rank in ranks):
        raise ProgramError("deadlock: the ranks wait for each other for ever")


def _advance_host(rank: _Knowledge, on_the_way: dict[Transfer, _Clock]) -> Iterator[Instruction]:
    """Handles instructions up to a delegated receive whose message hasn't been sent."""
    instructions = rank.program.instructions
    while rank.handled < len(instructions):
        step = instructions[rank.handled]
        if isinstance(step, Receive) and step.route == "delegated":
            if step.transfer not in on_the_way:
                return
            np.maximum(rank.host, on_the_way.pop(step.transfer), out=rank.host)
        elif isinstance(step, Move):
            rank.queued.append((step, rank.host.copy()))
        rank.handled += 1
        rank.host[rank.program.rank] = rank.handled
        yield step


def _advance_queue(
    rank: _Knowledge, ranks: Sequence[_Knowledge], on_the_way: dict[Transfer, _Clock]
) -> bool:
    """Runs what a queue can run; returns whether anything moved."""
    moved = False
    while (step := rank.front) is not None:
        if step.route == "direct":
            peer = ranks[step.peer]
            if peer.front != step.other_end:
                break
            _pop(peer)
            _pop(rank)
            np.maximum(rank.queue, peer.queue, out=rank.queue)
            peer.queue[:] = rank.queue
        else:
            _pop(rank)
            on_the_way[step.transfer] = rank.queue.copy()
        moved = True
    return moved


def _pop(rank: _Knowledge) -> None:
    _, knew = rank.queued.popleft()
    np.maximum(rank.queue, knew, out=rank.queue)
