"""Both halves of the engine together, in simulated time, on lanes with all kinds of faults.

`Link` checks in every run: each message is delivered once, in order and byte-equal, and is still
the same when it is released; nothing is written into a delivered message; slots are released only
after the delivery.
"""

import random
from itertools import pairwise

import pytest
from simulated_link import Link, Memory, Wire

from jaxmorph.transport.link_emulator import LinkEmulator
from jaxmorph.transport.names import ChannelName

NAME = ChannelName(1, 0, 1)
GIGABIT = 125e6
MEGABYTE = 1 << 20
SEEDS = range(24)


class Emulated(LinkEmulator):
    """A link that delays each message, or is cut."""

    def __init__(self, latency_s=0.0):
        super().__init__(())
        self.latency_s, self.cut = latency_s, False

    def departure_s(self, source, destination, tag, num_bytes, now_s):
        return None if self.cut else now_s + self.latency_s * random.Random(num_bytes).random()

    def is_cut(self, source, destination, step, now_s):
        return self.cut


def random_link(rng):
    wires = [
        Wire(10 ** rng.uniform(4.5, 7), 10 ** rng.uniform(-4, -1.5))
        for _ in range(rng.randint(1, 4))
    ]
    chunk_bytes = rng.choice([1024, 1024, 16384, 20000])
    memories = [
        random_memory(rng, ChannelName(1, 0, 1, index), chunk_bytes)
        for index in range(rng.randint(1, 3))
    ]
    return Link(
        wires,
        memories,
        chunk_bytes,
        buffer_bytes=rng.choice([1, 4096, MEGABYTE]),
        consume_s=lambda: rng.choice([0, 0, 0.001, 0.05]),
    )


def random_memory(rng, name, chunk_bytes, num_messages=40):
    slot_bytes = rng.choice([1, 1024, 5000, 20000, 5 * chunk_bytes])
    lengths = [
        rng.choice([0, 1, slot_bytes, rng.randint(0, slot_bytes)]) for _ in range(num_messages)
    ]
    first = rng.choice([0, 2**32 - 3, 2**32 - 20, 5])
    return Memory(name, rng.choice([1, 2, 4, 8]), slot_bytes, first, lengths)


def fault(rng, link, emulated):
    """A random fault and its end, as pairs of delay and action."""
    lane = rng.randrange(len(link.wires))
    lanes = rng.choice([[lane], [lane], range(len(link.wires))])
    begins_s = rng.uniform(0, 3)
    ends_s = begins_s + rng.choice([0.01, 0.1, 0.4, 1, 2])
    noticed = [rng.choice([0, 0.01, 0.3]) for _ in range(2)]
    rate = 10 ** rng.uniform(3.5, 7)
    return rng.choice(
        [
            [(begins_s, lambda: [link.stop(lane) for lane in lanes]),
             (ends_s, lambda: [link.go(lane) for lane in lanes])],
            [(begins_s, lambda: link.reset(lane, *noticed))],
            [(begins_s, lambda: setattr(link.wires[lane], "bytes_per_s", rate))],
            [(begins_s, lambda: link.spoil(lane))],
            [(begins_s, link.restart_receiver)],
            [(begins_s, link.restart_sender)],
            [(begins_s, lambda: setattr(emulated, "cut", True)),
             (ends_s, lambda: setattr(emulated, "cut", False))],
            [(begins_s, lambda: setattr(link.wires[lane], "reachable", False)),
             (ends_s, lambda: setattr(link.wires[lane], "reachable", True))],
        ]
    )  # fmt: skip


def heal(link):
    for wire in link.wires:
        wire.bytes_per_s = max(wire.bytes_per_s, 3e4)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_message_arrives_once_and_intact_under_faults(seed):
    rng = random.Random(seed)
    link = random_link(rng)
    emulated = Emulated(rng.choice([0, 0, 0.01]))
    link.emulation = emulated
    link.outgoing.emulate(emulated)
    for _ in range(25):
        for after_s, action in fault(rng, link, emulated):
            link.after(after_s, action)
    link.after(6, lambda: heal(link))
    assert link.run(link.now + 300)


def stream(
    wires, num_messages=30, message_bytes=8 * MEGABYTE, faults=(), chunk_bytes=256 * 1024, **changes
):
    """Run a stream of long messages without their bytes."""
    memory = Memory(NAME, 4, message_bytes, 0, [message_bytes] * num_messages)
    link = Link(wires, [memory], chunk_bytes, carries=False, **changes)
    for after_s, action in faults:
        link.after(after_s, lambda action=action: action(link))
    began_s = link.now
    assert link.run(link.now + 120)
    bytes_per_s = num_messages * message_bytes / (memory.delivered_s[-1] - began_s)
    return link, bytes_per_s, max(after - at for at, after in pairwise(memory.delivered_s))


def wires_of(*rates, latency_s=1e-4):
    return [Wire(rate, latency_s) for rate in rates]


def throttled(lane, bytes_per_s):
    return lambda link: setattr(link.wires[lane], "bytes_per_s", bytes_per_s)


@pytest.mark.parametrize("latency_s", [1e-4, 30e-3])
def test_lanes_are_kept_busy_whatever_their_latency(latency_s):
    _, alone, _ = stream(wires_of(GIGABIT, latency_s=latency_s))
    assert alone > 0.85 * GIGABIT
    _, both, _ = stream(wires_of(GIGABIT, GIGABIT, latency_s=latency_s))
    assert both > 1.6 * GIGABIT


@pytest.mark.parametrize("slow", [GIGABIT / 1000, GIGABIT / 100, GIGABIT / 20, GIGABIT / 5])
def test_a_slow_lane_does_not_delay_a_good_one(slow):
    _, alone, gap_alone_s = stream(wires_of(GIGABIT))
    _, beside, gap_s = stream(wires_of(GIGABIT, slow))
    assert beside >= 0.9 * alone
    assert gap_s <= 2 * gap_alone_s
    if slow < GIGABIT / 5:  # and one that turns slow does not, either
        _, turned, gap_s = stream(wires_of(GIGABIT, GIGABIT), faults=[(0.3, throttled(0, slow))])
        assert turned >= 0.9 * alone
        assert gap_s < 0.25


def test_a_slow_lane_is_not_given_up():
    link, _, _ = stream(
        wires_of(GIGABIT, GIGABIT),
        chunk_bytes=512 * 1024,
        faults=[(0.3, throttled(0, GIGABIT / 100))],
    )
    assert link.timed_out == []


def test_a_recovered_lane_is_used_again():
    link, throughput, _ = stream(
        wires_of(GIGABIT, GIGABIT),
        num_messages=90,
        faults=[(0.3, throttled(0, GIGABIT / 100)), (1.0, throttled(0, GIGABIT))],
    )
    assert throughput > 1.5 * GIGABIT
    assert not any(lane["parked"] for lane in link.outgoing.statistics()["lanes"].values())


@pytest.mark.parametrize("lost", [[0], [0, 1], [0, 1, 2]])
def test_lanes_lost_in_mid_message_leave_a_short_gap(lost):
    link, _, gap_s = stream(
        wires_of(*[GIGABIT / 4] * 4),
        faults=[(0.31, lambda link: [link.stop(lane) for lane in lost])],
    )
    assert gap_s < 0.5
    assert sorted(lane for _, lane in link.timed_out) == lost


@pytest.mark.parametrize("after_s", [1.0, 1.013, 1.029, 1.041])
@pytest.mark.parametrize("lanes_of_a_card", [1, 2])
def test_a_lost_slow_card_costs_less_than_its_share(lanes_of_a_card, after_s):
    card, message_bytes = GIGABIT / 10, 4 * MEGABYTE
    lost = range(0, 2 * lanes_of_a_card, 2)
    _, _, gap_s = stream(
        wires_of(*[card / lanes_of_a_card] * 2 * lanes_of_a_card),
        message_bytes=message_bytes,
        chunk_bytes=512 * 1024,
        faults=[(after_s, lambda link: [link.stop(lane) for lane in lost])],
    )
    assert gap_s < 1.1 * message_bytes / card  # which is how long one takes over the other card


def test_all_lanes_lost_come_back_by_themselves():
    _, _, gap_s = stream(
        wires_of(GIGABIT, GIGABIT),
        faults=[
            (0.3, lambda link: [link.stop(0), link.stop(1)]),
            (2.3, lambda link: [link.go(0), link.go(1)]),
        ],
    )
    assert 1.9 < gap_s < 2.5


def test_a_short_stop_costs_no_lane():
    link, _, gap_s = stream(
        wires_of(GIGABIT, GIGABIT),
        faults=[(0.3, lambda link: link.stop(0)), (0.4, lambda link: link.go(0))],
    )
    assert link.timed_out == []
    assert gap_s < 0.25


def test_a_faster_copy_fences_a_stuck_lane():
    memory = Memory(NAME, 4, 16 * 1024, 2**32 - 8, [16 * 1024] * 100)
    link = Link(wires_of(2e6, 2e6), [memory], 1024)
    for at in range(4):
        link.after(0.1 * at + 0.0203, lambda: link.stop(0))
        link.after(0.1 * at + 0.0803, lambda: link.go(0))
    assert link.run(link.now + 60)
    assert link.redirected > 0
    assert link.copied >= link.redirected


def test_pings_report_room_lost_on_a_dead_lane(monkeypatch):
    memory = Memory(NAME, 1, 4096, 0, [4096] * 4)
    link = Link(wires_of(1e7, 1e7), [memory], 1024, consume_s=lambda: 0.2)
    consumed = link.incoming.set_consumed

    def consumed_as_the_lane_dies(channel, count):
        lane = link.incoming.latest_lane()
        if count == 2 and lane is not None:
            link.stop(lane)
        return consumed(channel, count)

    monkeypatch.setattr(link.incoming, "set_consumed", consumed_as_the_lane_dies)
    assert link.run(link.now + 1.5)  # less than it takes to give an idle lane up


class SharedCard(Link):
    """Lanes that share one network card more or less evenly.

    Some of the chunks, `stuck` of all, take five times as long.
    """

    def __init__(self, card_bytes_per_s, lanes, memory, every_s, stuck):
        self.rng, self.card, self.stuck = random.Random(3), card_bytes_per_s, stuck
        super().__init__(
            wires_of(*[card_bytes_per_s / lanes] * lanes),
            [memory],
            512 * 1024,
            carries=False,
            post_every_s=every_s,
        )

    def _transmit(self, pipe):
        if not pipe.busy:
            sending = 1 + sum(other.busy for other in self.pipes.values())
            takes = sending * (5 if self.rng.random() < self.stuck else 1)
            self.wires[pipe.lane].bytes_per_s = self.card / takes * self.rng.uniform(0.5, 1.5)
        super()._transmit(pipe)


@pytest.mark.parametrize("card", [GIGABIT, GIGABIT / 10])
@pytest.mark.parametrize(("lanes", "stuck"), [(2, 0.05), (4, 0.0)])
@pytest.mark.parametrize("load", [1.5, 0.5])
def test_irregular_lanes_of_a_card_send_few_copies(card, lanes, stuck, load):
    num_bytes, num_messages = 4 * MEGABYTE, 50
    memory = Memory(NAME, 4, num_bytes, 0, [num_bytes] * num_messages)
    link = SharedCard(card, lanes, memory, num_bytes / card / load, stuck)
    assert link.run(link.now + 600)
    counts = link.outgoing.statistics()
    assert counts["copies"] <= 0.1 * counts["chunks"]
