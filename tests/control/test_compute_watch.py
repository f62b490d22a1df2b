import numpy as np
import pytest

from jaxmorph.control.compute_watch import ComputeWatch, updated_costs
from jaxmorph.control.measurements import op_times
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.timeline import Timeline

COSTS = StageCosts.uniform(2, 10.0, 12.0, 8.0)
KINDS = (("F", 10.0), ("B", 12.0), ("W", 8.0))


def step(slow_stage=None, factor=1.0, kinds="FBW", busy=(), rng=None):
    """Twelve microbatches on two stages; ops of `busy` ones take 40 ms more."""
    orders, ends = [], []
    for stage in range(2):
        order, took = [], []
        for microbatch in range(12):
            for kind, ms in KINDS:
                slow = factor if stage == slow_stage and kind in kinds else 1.0
                order.append(Op(OpKind(kind), microbatch))
                noise = rng.exponential(0.3) if rng is not None else 0.0
                took.append(ms * slow + noise + (40.0 if microbatch in busy else 0.0))
        orders.append(tuple(order))
        ends.append(np.cumsum(took))
    starts = tuple(np.concatenate([[0.0], end[:-1]]) for end in ends)
    return Timeline(tuple(orders), starts, tuple(ends))


def notices(*steps, costs=COSTS):
    watch, found = ComputeWatch(costs), []
    for number, each in enumerate(steps):
        watch, new = watch.observe(number, op_times(each))
        found += new
    return found


def test_a_slower_stage_is_reported_once_with_its_times():
    found = notices(step(), *[step(1, 1.5)] * 12)
    assert [(each.stage, each.kind, each.step) for each in found] == [
        (1, OpKind.B, 5),
        (1, OpKind.F, 5),
        (1, OpKind.W, 5),
    ]
    first = found[0]
    assert (first.expected_ms, first.measured_ms) == (12.0, pytest.approx(18.0))
    assert first.evidence.samples_ms == pytest.approx((18.0,) * 5)
    says = "stage 1 is slower: B takes 18.0 ms in 5 steps in a row, 12.0 was expected"
    assert first.reason == says


def test_a_stage_that_recovers_is_reported():
    found = notices(*[step(0, 1.5, "F")] * 6, *[step()] * 6)
    assert [(each.measured_ms, each.reason.split(":")[0]) for each in found] == [
        (pytest.approx(15.0), "stage 0 is slower"),
        (pytest.approx(10.0), "stage 0 is faster"),
    ]


def noise():
    rng = np.random.default_rng(0)
    return [step(rng=rng) for _ in range(100)]


@pytest.mark.parametrize(
    "steps",
    [
        [step(busy=range(6))] * 20,  # half of the ops take longer
        [step(), *[step(0, 3.0)] * 4] * 8,  # four in a row
        [*[step(0, 1.5, "F")] * 4, step(0, 0.5, "F")] * 5,  # slower and faster in turn
        noise(),
    ],
)
def test_what_does_not_last_is_not_reported(steps):
    assert notices(*steps) == []


def test_full_backwards_are_compared_with_both_parts():
    order = tuple(Op(OpKind.BW, m) for m in range(4))
    ends = np.arange(1, 5) * 26.0
    whole = Timeline((order,), (ends - 26.0,), (ends,))
    costs = StageCosts.uniform(1, 10.0, 12.0, 8.0)
    (notice,) = notices(*[whole] * 5, costs=costs)
    assert (notice.expected_ms, notice.measured_ms) == (20.0, 26.0)
    assert updated_costs(costs, [notice]).backward_input_ms == (18.0,)
    assert notices(*[whole] * 5, costs=StageCosts.uniform(1, 10.0, 26.0, 0.0)) == []


def test_costs_follow_what_was_noticed():
    found = notices(*[step(1, 2.0)] * 5)
    assert updated_costs(COSTS, found) == StageCosts((10, 20), (12, 24), (8, 16))
