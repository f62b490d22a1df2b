import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.records import Link
from jaxmorph.schedule.costs import (
    CopyCosts,
    Limits,
    LinkDelay,
    StageCosts,
    StageMemory,
    StashBytes,
    chain_links,
    require_stages_exist,
)
from jaxmorph.schedule.ops import Op
from tests.oracles.brute_force import every_row


def test_link_text_round_trips():
    assert str(Link(2, 3)) == "2-3"
    assert Link.parse("2-3") == Link.of(3, 2) == Link.of(2, 3) == Link(2, 3)
    for text in ("3-2", "2", "2-", "a-b", "2-2", "1-2-3"):
        with pytest.raises(ValueError, match="expected a link such as 2-3"):
            Link.parse(text)


def test_chain_links_have_one_latency_both_ways():
    assert chain_links([1.0, 2.0])[Link(1, 2)] == LinkDelay(2.0, 2.0)


_MEMORIES = st.builds(
    lambda forward, backward, spare: StageMemory(forward, backward, max(forward, backward) + spare),
    st.integers(0, 4),
    st.integers(0, 6),
    st.integers(0, 12),
)


def _order(text: str) -> list[Op]:
    return [Op.parse(word) for word in text.split()]


@pytest.mark.parametrize(
    ("memory", "order", "peak"),
    [
        (StageMemory(4, 1, 99), "F0 F1 B0 B1 W0 W1", 8),
        (StageMemory(4, 1, 99), "F0 B0 W0 F1 B1 W1", 4),
        (StageMemory(4, 1, 99), "F0 B0 F1 W0 B1 W1", 5),
        (StageMemory(4, 1, 99), "F0 F1 F2 B0 B1 B2 W0 W1 W2", 12),
        (StageMemory(4, 1, 99), "F0 F1 BW0 BW1", 8),
        (StageMemory(1, 3, 99), "F0 F1 B0 W0 B1 W1", 4),
        (StageMemory(1, 3, 99), "F0 F1 B0 B1 W0 W1", 6),
        (StageMemory(4, 1, 99), "", 0),
    ],
)
def test_the_peak_counts_stashes_until_b_and_w(memory, order, peak):
    assert memory.peak(_order(order)) == peak


def _most_waiting(memory: StageMemory, limit: int) -> int:
    """By trial: the most forwards after which every B still has room, with W right behind."""
    fits = 0
    for waiting in range(1, limit + 1):
        order = [f"F{m}" for m in range(waiting)]
        order += [f"{kind}{m}" for m in range(waiting) for kind in "BW"]
        if memory.peak(_order(" ".join(order))) <= memory.room:
            fits = waiting
    return fits


@given(_MEMORIES)
def test_most_forwards_leave_room_for_their_backwards(memory):
    assert _most_waiting(memory, 20) == (
        20 if memory.most_forwards is None else memory.most_forwards
    )


@pytest.mark.parametrize(
    ("memory", "slots"),
    [
        (StageMemory(1, 0, 3), [(3, False)]),
        (StageMemory(1, 1, 3), [(3, False), (3, True)]),
        (StageMemory(4, 2, 9), [(2, False), (4, True)]),
        (StageMemory(1, 3, 4), [(2, False), (4, True)]),
        (StageMemory(0, 3, 7), []),
        (StageMemory(1, 1, 8), []),
        (StageMemory(1, 1, 5), []),
    ],
)
def test_slots_are_the_limits_below_five_microbatches(memory, slots):
    assert list(memory.slots(5)) == slots


@given(_MEMORIES)
def test_no_fitting_order_uses_more_slots(memory):
    fitting = [row for row in every_row(3) if memory.peak(row) <= memory.room]
    assert fitting
    for places, until_weight in memory.slots(3):
        counted = StageMemory(1, int(until_weight), 3)
        assert max(map(counted.peak, fitting)) <= places


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StageCosts((1.0, 1.0), (1.0,), (1.0, 1.0)), "backward_input_ms: got 1 values"),
        (lambda: StageCosts((), (), ()), "no stages"),
        (lambda: StageCosts((1.0,), (1.0,), (-1.0,)), "backward_weight_ms: got -1.0"),
        (lambda: StageCosts((1.0, 1.0), (1.0, math.nan), (1.0, 1.0)), r"input_ms\[1\]: got nan"),
        (lambda: LinkDelay(0.0, -1.0), "backward_latency_ms: got -1.0, expected a finite"),
        (lambda: LinkDelay(forward_occupancy_ms=math.inf), "forward_occupancy_ms: got inf"),
        (
            lambda: require_stages_exist({Link(2, 3): LinkDelay()}, 3),
            "link 2-3: expected two of the",
        ),
        (lambda: Limits((1, 0)), r"max_live\[1\]: got 0, expected at least 1"),
        (lambda: Limits((1, 1)).caps(3, 8), "max_live: got 2 values, expected 3"),
        (lambda: Limits(live_until="F"), "live_until: got 'F'"),  # pyright: ignore[reportArgumentType]
        (lambda: StashBytes((1, 2), (3,)), "got 2 stages after F and 1 after B, expected the same"),
        (lambda: StashBytes((1, -2), (3, 4)), r"\(1, -2\).*at least 0 bytes"),
        (lambda: CopyCosts((1.0, 2.0), (1.0,)), "fetch_ms: got 1 stages, expected 2"),
        (lambda: CopyCosts((1.0, 2.0), (1.0, -1.0)), r"fetch_ms\[1\]: got -1.0, expected a finite"),
    ],
)
def test_impossible_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
