from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.records import Link
from jaxmorph.schedule.bubbles import (
    Bubble,
    IdleCause,
    bubble_ms,
    find_bubbles,
    idle_spans,
    mean_shares,
    step_shares,
)
from jaxmorph.schedule.costs import LinkDelay, StageCosts, chain_links
from jaxmorph.schedule.fixed import FIXED_SCHEDULES, interleaved, one_forward_one_backward, zb_v
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.simulate import simulate
from jaxmorph.schedule.timeline import CopySpan, Timeline, TransferSpan


def _rows(timeline: Timeline, spans: Sequence[Bubble] | None = None) -> list[str]:
    """A line per stage, of bubbles such as ``20-45 dependency``."""
    rows: list[list[str]] = [[] for _ in timeline.orders]
    for stage, start, end, cause in spans or find_bubbles(timeline):
        rows[stage].append(f"{start:g}-{end:g} {cause}")
    return [", ".join(row) for row in rows]


def _measured(rows: list[list[tuple[str, float, float]]], *transfers: TransferSpan) -> Timeline:
    return Timeline(
        tuple(tuple(Op.parse(name) for name, _, _ in row) for row in rows),
        tuple(np.array([start for _, start, _ in row]) for row in rows),
        tuple(np.array([end for _, _, end in row]) for row in rows),
        transfers,
    )


def test_bubbles_of_1f1b_over_a_slow_link():
    costs = StageCosts.uniform(2, 10.0, 10.0, 10.0)
    assert _rows(simulate(one_forward_one_backward(2, 4), costs, chain_links([5.0]))) == [
        "20-45 dependency, 45-50 transfer, 110-115 dependency, 115-120 transfer, "
        "140-145 dependency, 145-150 transfer",
        "0-10 warm-up, 10-15 transfer, 75-80 dependency, 80-85 transfer, 145-170 cool-down",
    ]


def test_chunks_wait_for_the_link_around():
    around = {Link(0, 2): LinkDelay(5.0, 7.0)}
    costs = StageCosts.uniform(3, 4.0, 4.0, 4.0)
    causes = bubble_ms(simulate(interleaved(3, 3, 2), costs, around))
    assert causes[IdleCause.TRANSFER] > 0
    assert bubble_ms(simulate(interleaved(3, 3, 2), costs))[IdleCause.TRANSFER] == 0


def test_only_transfers_of_other_data_are_blocking():
    timeline = _measured(
        [[("F0", 0, 10), ("F1", 10, 20), ("B0", 50, 60)], [("F0", 14, 24), ("B0", 24, 34)]],
        TransferSpan(0, "activation[0] 0>1", 10, 12),
        TransferSpan(1, "activation[0] 0>1", 0, 12),
        TransferSpan(0, "activation[1] 0>1", 20, 40),
        TransferSpan(0, "gradient[0] 1>0", 40, 45),
        TransferSpan(1, "gradient[0] 1>0", 34, 45),
    )
    assert _rows(timeline) == [
        "20-34 dependency, 34-40 blocking, 40-45 transfer, 45-50 dispatch",
        "0-10 warm-up, 10-12 transfer, 12-14 dispatch, 34-60 cool-down",
    ]


@pytest.mark.parametrize(
    ("other_ms", "rest"),
    [(45, "45-50 dispatch"), (40, "45-50 dispatch"), (48, "45-48 blocking, 48-50 dispatch")],
)
def test_a_pair_blocks_only_by_its_slower_direction(other_ms, rest):
    timeline = _measured(
        [[("F0", 0, 10), ("F1", 10, 20), ("B0", 50, 60)], [("F0", 10, 24), ("B0", 24, 34)]],
        TransferSpan(0, "activation[1] 0>1", 20, other_ms),
        TransferSpan(0, "gradient[0] 1>0", 20, 45),
        TransferSpan(1, "gradient[0] 1>0", 34, 45),
        TransferSpan(1, "activation[1] 0>1", 34, other_ms),
    )
    assert _rows(timeline)[0] == f"20-34 dependency, 34-45 transfer, {rest}"


def test_a_late_sender_blocks_its_receiver():
    timeline = _measured(
        [[("F0", 0, 10), ("F1", 25, 35)], [("F0", 30, 40)]],
        TransferSpan(0, "activation[0] 0>1", 22, 25),
        TransferSpan(1, "activation[0] 0>1", 0, 25),
    )
    assert _rows(timeline)[1] == "0-10 warm-up, 10-22 blocking, 22-25 transfer, 25-30 dispatch"
    assert _rows(timeline)[0].startswith("10-22 dispatch, 22-25 blocking")


def test_a_gap_before_a_ready_op_is_dispatch():
    timeline = _measured([[("F0", 1, 2), ("B0", 3, 4), ("W0", 6, 7)]])
    assert _rows(timeline) == ["0-1 warm-up, 2-3 dispatch, 4-6 dispatch"]


def test_a_transfer_takes_precedence_over_a_copy():
    timeline = replace(
        _measured(
            [[("F0", 0, 10), ("B0", 60, 70)], [("F0", 12, 22), ("B0", 22, 32)]],
            TransferSpan(1, "activation[0] 0>1", 10, 12),
            TransferSpan(0, "gradient[0] 1>0", 32, 40, holds_queue=False),
        ),
        copies=(CopySpan(0, "offload", 0, 0, 10, 30), CopySpan(0, "fetch", 0, 0, 36, 56)),
    )
    assert _rows(timeline)[0] == "10-32 dependency, 32-40 transfer, 40-56 copies, 56-60 dispatch"
    shares = step_shares(timeline)[0]
    assert shares.copies + shares.dispatch == pytest.approx(20 / 70)


def test_copies_count_only_if_an_op_waited_for_them():
    timeline = replace(
        _measured([[("F0", 0, 10), ("F1", 14, 24), ("F2", 30, 40), ("W0", 45, 50)]]),
        copies=(
            CopySpan(0, "offload", 0, 0, 10, 28),  # F1 has not waited for it, F2 has
            CopySpan(0, "fetch", 1, 0, 41, 44),
        ),
    )
    assert _rows(timeline) == ["10-14 dispatch, 24-28 copies, 28-30 dispatch, 40-45 dispatch"]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=6),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=2, max_size=4),
)
def test_an_op_waits_for_offloads_that_end_before_it(offloads, ops):
    ends = [*accumulate(gap + long for gap, long in ops)]
    row = [(f"F{at}", end - ops[at][1], end) for at, end in enumerate(ends)]
    copies = tuple(CopySpan(0, "offload", 0, 0, at, at + long) for at, long in offloads)
    waited = {
        ms
        for (*_, free), (_, start, _) in pairwise([("", 0, 0), *row])
        for copy in copies
        if free < copy.end_ms <= start
        for ms in range(max(free, int(copy.start_ms)), int(copy.end_ms))
    }
    causes = bubble_ms(replace(_measured([row]), copies=copies))
    assert causes[IdleCause.COPIES] == len(waited)


def _idle(timeline):
    """Of each stage the shares of blocking, waits for data, and the rest."""
    shares = step_shares(timeline)
    return [(each.blocking, each.waits, each.copies + each.dispatch) for each in shares]


def test_shares_separate_blocking_from_dependency():
    # Stage 0 could run F1 from 10 on, but its queue is held by the send of F0 until 40.
    direct = _measured(
        [[("F0", 0, 10), ("F1", 40, 50)], [("F0", 40, 50)]],
        TransferSpan(0, "activation[0] 0>1", 10, 40),
        TransferSpan(1, "activation[0] 0>1", 0, 40),
    )
    assert _idle(direct) == [(0.6, 0.0, 0.0), (0.0, 0.8, 0.0)]
    # Delegated, it holds no queue; only the receiver waits, for its own data.
    delegated = _measured(
        [[("F0", 0, 10), ("F1", 10, 20)], [("F0", 40, 50)]],
        TransferSpan(1, "activation[0] 0>1", 10, 40, holds_queue=False),
        TransferSpan(1, "activation[1] 0>1", 20, 50, holds_queue=False),
    )
    assert _idle(delegated) == [(0.0, 0.6, 0.0), (0.0, 0.8, 0.0)]


def test_data_for_a_blocked_receiver_is_blocking():
    # F1 is made at 20, while both queues are held by the gradient of B0 until 60.
    timeline = _measured(
        [[("F0", 0, 10), ("F1", 10, 20)], [("F0", 10, 20), ("B0", 20, 30), ("F1", 90, 100)]],
        TransferSpan(0, "gradient[0] 1>0", 20, 60),
        TransferSpan(1, "gradient[0] 1>0", 30, 60),
        TransferSpan(0, "activation[1] 0>1", 60, 90),
        TransferSpan(1, "activation[1] 0>1", 60, 90),
    )
    blocking, dependency, other = _idle(timeline)[1]
    assert (blocking, other) == (pytest.approx(0.3), 0.0)
    assert dependency == pytest.approx(0.1 + 0.3)


def test_an_empty_step_has_no_idle_shares():
    assert _idle(_measured([[]])) == [(0.0, 0.0, 0.0)]


TIMELINE = _measured(
    [[("F0", 5, 10), ("F1", 10, 20), ("B0", 50, 60)], [("F0", 14, 24), ("B0", 24, 34)]],
    TransferSpan(0, "activation[0] 0>1", 10, 12),
    TransferSpan(1, "activation[0] 0>1", 0, 12),
    TransferSpan(0, "activation[1] 0>1", 20, 40),
    TransferSpan(0, "gradient[0] 1>0", 40, 45),
    TransferSpan(1, "gradient[0] 1>0", 34, 45),
)


def test_idle_spans_cover_the_step_between_barriers():
    assert _rows(TIMELINE, idle_spans(TIMELINE, 70.0)) == [
        "0-5 optimizer, 20-34 dependency, 34-40 blocking, 40-45 transfer, 45-50 dispatch, "
        "60-70 optimizer",
        "0-5 optimizer, 5-10 warm-up, 10-12 transfer, 12-14 dispatch, 34-60 cool-down, "
        "60-70 optimizer",
    ]


def test_waiting_for_copies_is_not_dispatch():
    timeline = replace(
        _measured([[("F0", 0, 10), ("F1", 25, 35), ("B0", 52, 60)]]),
        copies=(CopySpan(0, "offload", 0, 0, 10, 24), CopySpan(0, "fetch", 0, 0, 40, 50)),
    )
    assert _rows(timeline, idle_spans(timeline, 60.0)) == [
        "10-24 copies, 24-25 dispatch, 35-50 copies, 50-52 dispatch"
    ]
    (shares,) = step_shares(timeline, 60.0)
    assert (shares.copies, shares.dispatch) == pytest.approx((29 / 60, 3 / 60))


def test_shares_are_of_the_whole_step():
    first, second = step_shares(TIMELINE, 100.0)
    assert first._asdict() == pytest.approx(
        {
            "compute": 0.25, "warm_up": 0.0, "dependency": 0.14, "transfer": 0.05,
            "blocking": 0.06, "copies": 0.0, "dispatch": 0.05, "cool_down": 0.0, "optimizer": 0.45,
        }
    )  # fmt: skip
    assert (second.compute, second.cool_down) == pytest.approx((0.2, 0.26))
    assert mean_shares((first, second)).compute == pytest.approx(0.225)


def test_a_simulated_step_has_no_optimizer_time():
    timeline = simulate(FIXED_SCHEDULES["zb-h2"](4, 12), StageCosts.uniform(4, 10.0, 10.0, 10.0))
    causes = {span.cause for span in idle_spans(timeline)}
    assert causes == {IdleCause.WARM_UP, IdleCause.COOL_DOWN}
    assert [shares.compute for shares in step_shares(timeline)] == pytest.approx(4 * [360 / 390])


def test_a_step_lasts_at_least_as_long_as_its_ops():
    assert step_shares(TIMELINE, 59.0) == step_shares(TIMELINE)


@given(
    build=st.sampled_from([*FIXED_SCHEDULES.values(), zb_v]),
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 7),
    tail_ms=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_ops_and_idle_times_fill_every_step(build, stages, microbatches, tail_ms, seed):
    random = np.random.default_rng(seed)
    costs = StageCosts(*(tuple(random.uniform(0.1, 9.0, stages)) for _ in range(3)))
    links = chain_links(tuple(random.choice([0.0, 3.3, 17.0], stages - 1)))
    timeline = simulate(build(stages, microbatches), costs, links)
    filled = [[] for _ in range(stages)]
    for stage, _, start, end in timeline.spans():
        filled[stage].append((start, end))
    for stage, start, end, cause in find_bubbles(timeline):
        assert cause not in (IdleCause.BLOCKING, IdleCause.DISPATCH)
        filled[stage].append((start, end))
    for row in filled:
        begins, finishes = zip(*sorted(row), strict=True)
        assert [*begins, timeline.makespan_ms] == pytest.approx([0.0, *finishes], abs=1e-6)
    step_ms = timeline.makespan_ms + tail_ms
    for busy_ms, shares in zip(timeline.busy_ms, step_shares(timeline, step_ms), strict=True):
        assert sum(shares) == pytest.approx(1.0)
        assert min(shares) >= -1e-9
        assert shares.compute == pytest.approx(busy_ms / step_ms, abs=1e-6)
        assert shares.optimizer == pytest.approx(tail_ms / step_ms, abs=1e-6)
