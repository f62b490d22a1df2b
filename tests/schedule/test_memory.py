import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.schedule.memory import StageMemory, StashBytes
from jaxmorph.schedule.ops import Op

_MEMORIES = st.builds(
    lambda forward, backward, spare: StageMemory(forward, backward, max(forward, backward) + spare),
    st.integers(0, 4),
    st.integers(0, 6),
    st.integers(0, 12),
)


def _order(text: str) -> list[Op]:
    return [Op.parse(word) for word in text.split()]


@pytest.mark.parametrize(
    ("order", "peak"),
    [
        ("F0 F1 B0 B1 W0 W1", 8),
        ("F0 B0 W0 F1 B1 W1", 4),
        ("F0 B0 F1 W0 B1 W1", 5),
        ("F0 F1 F2 B0 B1 B2 W0 W1 W2", 12),
        ("F0 F1 BW0 BW1", 8),
    ],
)
def test_the_peak_of_an_order_that_holds_four_until_b_and_one_until_w(order, peak):
    assert StageMemory(4, 1, 99).peak(_order(order)) == peak


def test_where_b_leaves_more_than_f_the_peak_comes_with_it():
    memory = StageMemory(1, 3, 99)
    assert memory.peak(_order("F0 F1 B0 W0 B1 W1")) == 4
    assert memory.peak(_order("F0 F1 B0 B1 W0 W1")) == 6


def test_no_ops_hold_nothing():
    assert StageMemory(4, 1, 99).peak([]) == 0


@given(_MEMORIES, st.integers(0, 2**32).map(Random))
def test_the_peak_is_the_most_of_all_shares_looked_up_after_every_op(memory, draw):
    left = {microbatch: ["F", "B", "W"] for microbatch in range(5)}
    order, most = [], 0
    held = dict.fromkeys(left, 0)
    while left:
        microbatch = draw.choice(list(left))
        kind = left[microbatch].pop(0)
        order.append(Op.parse(f"{kind}{microbatch}"))
        held[microbatch] = {"F": memory.forward_holds, "B": memory.backward_holds, "W": 0}[kind]
        most = max(most, sum(held.values()))
        if not left[microbatch]:
            del left[microbatch]
    assert memory.peak(order) == most


def _most_waiting(memory: StageMemory, limit: int) -> int:
    """By trial: the most forwards from which every B can still come, W always right behind."""
    fits = 0
    for waiting in range(1, limit + 1):
        order = [f"F{m}" for m in range(waiting)]
        order += [f"{kind}{m}" for m in range(waiting) for kind in "BW"]
        if memory.peak(_order(" ".join(order))) <= memory.room:
            fits = waiting
    return fits


@given(_MEMORIES)
def test_the_most_forwards_are_those_whose_backwards_can_all_still_come(memory):
    assert _most_waiting(memory, 20) == (
        20 if memory.most_forwards is None else memory.most_forwards
    )


def test_forwards_that_hold_nothing_may_all_wait():
    assert StageMemory(0, 3, 3).most_forwards is None


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
def test_places_for_five_microbatches_until_b_and_until_w(memory, slots):
    assert list(memory.slots(5)) == slots


def _rows(count: int) -> list[list[Op]]:
    """Every order of one stage's F, B and W in which ops of a kind keep microbatch order."""

    def extended(row: tuple[str, ...], f: int, b: int, w: int) -> list[tuple[str, ...]]:
        if w == count:
            return [row]
        rows = extended((*row, f"F{f}"), f + 1, b, w) if f < count else []
        rows += extended((*row, f"B{b}"), f, b + 1, w) if b < f else []
        return rows + (extended((*row, f"W{w}"), f, b, w + 1) if w < b else [])

    return [_order(" ".join(row)) for row in extended((), 0, 0, 0)]


_ROWS_OF_3 = _rows(3)


@given(_MEMORIES)
def test_no_order_that_fits_uses_more_places_than_there_are(memory):
    fitting = [row for row in _ROWS_OF_3 if memory.peak(row) <= memory.room]
    assert fitting
    for places, until_weight in memory.slots(3):
        counted = StageMemory(1, int(until_weight), 3)
        assert max(map(counted.peak, fitting)) <= places


@pytest.mark.parametrize(("memory", "needed"), [((4, 1, 9), 4), ((1, 3, 9), 3), ((0, 0, 0), 0)])
def test_one_microbatch_needs_the_larger_of_what_f_and_b_leave(memory, needed):
    assert StageMemory(*memory).needed == needed


def test_stash_sizes_are_of_the_same_stages_and_not_negative():
    with pytest.raises(ValueError, match="got 2 stages after F and 1 after B, expected the same"):
        StashBytes((1, 2), (3,))
    with pytest.raises(ValueError, match=re.escape("(1, -2)") + ".*at least 0 bytes"):
        StashBytes((1, -2), (3, 4))
