from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.schedule.builders import FIXED_SCHEDULES
from jaxmorph.schedule.costs import StageCosts, chain_links
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.simulator import simulate
from jaxmorph.schedule.step_shares import IdleCause, idle_spans, mean_shares, step_shares
from jaxmorph.schedule.timeline import CopySpan, Timeline, TransferSpan


def _measured(rows: list[list[tuple[str, float, float]]], *transfers: TransferSpan) -> Timeline:
    return Timeline(
        tuple(tuple(Op.parse(name) for name, _, _ in row) for row in rows),
        tuple(np.array([start for _, start, _ in row]) for row in rows),
        tuple(np.array([end for _, _, end in row]) for row in rows),
        transfers,
    )


TIMELINE = _measured(
    [[("F0", 5, 10), ("F1", 10, 20), ("B0", 50, 60)], [("F0", 14, 24), ("B0", 24, 34)]],
    TransferSpan(0, "activation[0] 0>1", 10, 12),
    TransferSpan(1, "activation[0] 0>1", 0, 12),
    TransferSpan(0, "activation[1] 0>1", 20, 40),
    TransferSpan(0, "gradient[0] 1>0", 40, 45),
    TransferSpan(1, "gradient[0] 1>0", 34, 45),
)


def _rows(timeline: Timeline, step_ms: float | None) -> list[str]:
    rows: list[list[str]] = [[] for _ in timeline.orders]
    for stage, start, end, cause in idle_spans(timeline, step_ms):
        rows[stage].append(f"{start:g}-{end:g} {cause}")
    return [", ".join(row) for row in rows]


def test_every_idle_time_has_its_cause_from_barrier_to_barrier():
    assert _rows(TIMELINE, 70.0) == [
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
    assert _rows(timeline, 60.0) == ["10-24 copies, 24-25 dispatch, 35-50 copies, 50-52 dispatch"]
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


def test_a_simulated_step_has_no_ends_beside_its_ops():
    timeline = simulate(FIXED_SCHEDULES["zb-h2"](4, 12), StageCosts.uniform(4, 10.0, 10.0, 10.0))
    causes = {span.cause for span in idle_spans(timeline)}
    assert causes == {IdleCause.WARM_UP, IdleCause.COOL_DOWN}
    assert [shares.compute for shares in step_shares(timeline)] == pytest.approx(4 * [360 / 390])


def test_a_step_shorter_than_its_ops_by_another_clock_is_as_long_as_they_are():
    assert step_shares(TIMELINE, 59.0) == step_shares(TIMELINE)


@given(
    name=st.sampled_from([*FIXED_SCHEDULES]),
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 7),
    tail_ms=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_shares_add_up_and_what_is_computed_is_the_ops_time(
    name, stages, microbatches, tail_ms, seed
):
    random = np.random.default_rng(seed)
    costs = StageCosts(*(tuple(random.uniform(0.1, 9.0, stages)) for _ in range(3)))
    links = chain_links(tuple(random.choice([0.0, 3.3, 17.0], stages - 1)))
    timeline = simulate(FIXED_SCHEDULES[name](stages, microbatches), costs, links)
    step_ms = timeline.makespan_ms + tail_ms
    for busy_ms, shares in zip(timeline.busy_ms, step_shares(timeline, step_ms), strict=True):
        assert sum(shares) == pytest.approx(1.0)
        assert min(shares) >= -1e-9
        assert shares.compute == pytest.approx(busy_ms / step_ms, abs=1e-6)
        assert shares.optimizer == pytest.approx(tail_ms / step_ms, abs=1e-6)
