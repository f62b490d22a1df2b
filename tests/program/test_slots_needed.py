"""The slots a channel needs, against every rank run in the order that keeps most messages back."""

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.config.sections import PLANNED_SCHEDULES
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.check import ProgramError
from jaxmorph.program.instructions import (
    Channel,
    Move,
    Offload,
    Payload,
    RankInstructions,
    Receive,
    Send,
    Transfer,
    channel_of,
)
from jaxmorph.program.lowering import lower
from jaxmorph.program.offload import offload
from jaxmorph.program.slots_needed import (
    HostRoom,
    most_offloaded_bytes,
    power_of_two,
    scarce_slots,
    slots_needed,
)
from jaxmorph.records import Link, Route
from jaxmorph.schedule.costs import Limits, LinkDelay, StageCosts, StageMemory, chain_links
from jaxmorph.schedule.fixed import FIXED_SCHEDULES, interleaved
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.simulate import simulate


@dataclass
class Rank:
    """A host that hands transfers to a queue, one after another."""

    program: RankInstructions
    position: int = 0
    queue: deque = field(default_factory=deque)


@dataclass
class Run:
    """All ranks, moved by hand; counts what a channel's sends hold."""

    programs: tuple[RankInstructions, ...]
    channel: Channel

    def __post_init__(self):
        self.ranks = [Rank(program) for program in self.programs]
        self.sent, self.under_way, self.most = set(), 0, 0

    def moves(self):
        """What could happen next: hosts by rank, and queues by rank + number of ranks."""
        return [n for n in range(2 * len(self.ranks)) if self._is_able(n)]

    def is_receive(self, move):
        """Whether a move takes a message of the channel."""
        step = self._step(move)
        is_host = move < len(self.ranks)
        return is_host and isinstance(step, Receive) and channel_of(step.transfer) == self.channel

    def make(self, move):
        step, rank = self._step(move), self.ranks[move % len(self.ranks)]
        assert step is not None
        if move >= len(self.ranks):
            rank.queue.popleft()
            if step.route == "direct":
                self.ranks[step.peer].queue.popleft()
            else:
                self.sent.add(step.transfer)
            return
        rank.position += 1
        if not isinstance(step, Move):
            return
        if step.route == "direct" or isinstance(step, Send):
            rank.queue.append(step)
        if step.route == "delegated" and channel_of(step.transfer) == self.channel:
            self.under_way += 1 if isinstance(step, Send) else -1
            self.most = max(self.most, self.under_way)

    def is_over(self):
        return all(
            rank.position == len(rank.program.instructions) and not rank.queue
            for rank in self.ranks
        )

    def _step(self, move):
        rank = self.ranks[move % len(self.ranks)]
        if move >= len(self.ranks):
            return rank.queue[0] if rank.queue else None
        steps = rank.program.instructions
        return steps[rank.position] if rank.position < len(steps) else None

    def _is_able(self, move):
        step = self._step(move)
        if step is None:
            return False
        if move < len(self.ranks):
            waits = isinstance(step, Receive) and step.route == "delegated"
            return not waits or step.transfer in self.sent
        if step.route == "delegated":
            return True
        other = self.ranks[step.peer]
        return bool(other.queue) and other.queue[0] == step.other_end


def most_under_way(programs, channel, choose):
    """The most messages of a channel at once, if `choose` picks each next move."""
    run = Run(programs, channel)
    while moves := run.moves():
        run.make(choose(run, moves))
    assert run.is_over()
    return run.most


def laziest(run, moves):
    """Takes a message of the channel only where nothing else can happen."""
    return min(moves, key=run.is_receive)


@st.composite
def lowered(draw):
    stages, microbatches = draw(st.integers(2, 4)), draw(st.integers(1, 6))
    row = st.tuples(*[st.floats(0.5, 8)] * stages)
    costs = StageCosts(draw(row), draw(row), draw(row))
    links = chain_links([draw(st.sampled_from([0.0, 20.0])) for _ in range(stages - 1)])
    name = draw(st.sampled_from([*FIXED_SCHEDULES, *PLANNED_SCHEDULES, "interleaved", "zb-v"]))
    if name == "interleaved":
        schedule = interleaved(stages, stages * draw(st.integers(1, 2)), draw(st.integers(2, 3)))
    else:
        schedule = plan(costs, links, Limits(), microbatches, name).schedule
    links.setdefault(Link(0, stages - 1), LinkDelay())
    routes = {link: draw(st.sampled_from(["direct", "delegated"])) for link in links}
    planned, pairs = simulate(schedule, costs, links), draw(st.booleans())
    programs = lower(schedule, planned, routes, num_tied=1, pairs=pairs)
    return programs, {link for link, route in routes.items() if route == "delegated"}


@given(lowered(), st.randoms(use_true_random=False))
def test_slots_needed_is_exact_for_any_timing(case, random):
    programs, delegated = case
    needed = slots_needed(programs)
    assert {channel.link for channel in needed} <= delegated
    for channel, slots in needed.items():
        assert power_of_two(most_under_way(programs, channel, laziest)) == slots
        shuffled = most_under_way(programs, channel, lambda run, moves: random.choice(moves))
        assert shuffled <= slots


@given(lowered(), st.sampled_from([0.0, 7.0]))
def test_needed_slots_cost_no_time_and_fewer_never_less(case, latency_ms):
    """With a latency the word of a free slot may be late, where others come around faster."""
    programs, _ = case
    size = len(programs)
    costs = StageCosts.uniform(size, 3.0, 2.0, 4.0)
    links = chain_links([latency_ms] * (size - 1))
    needed = slots_needed(programs)
    free = simulate_blocking(programs, costs, links)
    if not latency_ms:
        enough = simulate_blocking(programs, costs, links, slots=needed)
        assert [*map(list, enough.end_ms)] == [*map(list, free.end_ms)]
        assert sorted(enough.transfers) == sorted(free.transfers)
    fewer = {channel: max(1, slots // 2) for channel, slots in needed.items()}
    with suppress(ProgramError):
        limited = simulate_blocking(programs, costs, links, slots=fewer)
        assert limited.makespan_ms >= free.makespan_ms


THERE, BACK, TIED = (
    Channel(payload, *ends) for payload, ends in zip(Payload, ((0, 1), (1, 0), (0, 2)), strict=True)
)


def test_the_largest_channels_of_the_shortest_rank_get_fewer_slots():
    room = HostRoom({THERE: 10, BACK: 10, TIED: 1}, (101, 122, 100))
    assert room.slots_wanted({THERE: 16}) == {THERE: 16, BACK: 2, TIED: 2}
    assert room.taken_bytes({THERE: 16, BACK: 2, TIED: 2}, 3) == (182, 180, 2)
    # Four each are 82 on rank 0; eight of one would be 102.
    assert room.slots_that_fit({THERE: 16, BACK: 2}) == {THERE: 4, BACK: 2, TIED: 2}
    assert room.slots_that_fit({THERE: 8, BACK: 8, TIED: 1}) == {THERE: 4, BACK: 4, TIED: 2}
    assert room.slots_that_fit({THERE: 2}) == {THERE: 2, BACK: 2, TIED: 2}
    assert room.short_bytes() == (42 - 101, 40 - 122, 2 - 100)
    more = HostRoom(room.slot_bytes, (122, 122, 100))
    assert more.slots_that_fit({THERE: 16, BACK: 16}) == {THERE: 4, BACK: 8, TIED: 2}
    assert more.slots_that_fit({THERE: 16}) == {
        THERE: 8,
        BACK: 2,
        TIED: 2,
    }  # what another doesn't need
    # Evaluations get what training steps leave, and never take from them.
    assert more.slots_that_fit({THERE: 8}, {THERE: 16, BACK: 16}) == {THERE: 8, BACK: 4, TIED: 2}
    assert room.slots_that_fit({THERE: 4}, {BACK: 16}) == {THERE: 4, BACK: 4, TIED: 2}
    unlimited = HostRoom(room.slot_bytes)
    assert unlimited.slots_that_fit({THERE: 16}) == room.slots_wanted({THERE: 16})
    assert unlimited.short_bytes() == ()
    assert unlimited.holds((10**12,))
    assert [HostRoom({}, stash_bytes=(5, 5)).holds(away) for away in ((5, 5), (5, 6))] == [
        True,
        False,
    ]


def test_scarce_are_channels_with_fewer_than_needed():
    assert scarce_slots({THERE: 4, BACK: 2}, {THERE: 8, BACK: 1}) == {THERE: 4}


def test_offloaded_stashes_count_until_they_are_back():
    schedule = FIXED_SCHEDULES["gpipe"](2, 6)
    program = lower(schedule, simulate(schedule, StageCosts.uniform(2, 1, 1, 1)))[0]
    assert most_offloaded_bytes(program, 100) == 0
    moving = offload(program, StageMemory(1, 0, 3))
    away = sum(isinstance(step, Offload) for step in moving.instructions)
    assert away in (3, 4)
    assert 100 * away <= most_offloaded_bytes(moving, 100) <= 100 * (away + 1)


def test_a_deeper_warm_up_needs_more_slots_downstream():
    schedule = FIXED_SCHEDULES["zb-h2"](4, 12)
    costs = StageCosts.uniform(4, 10, 10, 10)
    routes: dict[Link, Route] = {Link(at, at + 1): "delegated" for at in range(3)}
    needed = slots_needed(lower(schedule, simulate(schedule, costs), routes))
    downstream = [needed[Channel(Payload.ACTIVATION, at, at + 1)] for at in range(3)]
    upstream = [needed[Channel(Payload.GRADIENT, at + 1, at)] for at in range(3)]
    assert schedule.warmup_forwards == (7, 5, 3, 1)
    assert downstream == [8, 8, 4]
    assert max(upstream) <= 8


def test_direct_links_need_none():
    schedule = FIXED_SCHEDULES["1f1b"](3, 4)
    programs = lower(schedule, simulate(schedule, StageCosts.uniform(3, 1, 1, 1)), num_tied=1)
    assert slots_needed(programs) == {}


@pytest.mark.parametrize(
    ("number", "rounded"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16)]
)
def test_slots_come_in_powers_of_two(number, rounded):
    assert power_of_two(number) == rounded


def test_a_deadlock_is_refused():
    there, back = (Transfer(Payload.ACTIVATION, *ends, 0) for ends in ((0, 1), (1, 0)))
    programs = [
        RankInstructions(0, 2, 1, (Receive(back, "delegated"), Send(there, "delegated"))),
        RankInstructions(1, 2, 1, (Receive(there, "delegated"), Send(back, "delegated"))),
    ]
    with pytest.raises(ProgramError, match="deadlock"):
        slots_needed(programs)
