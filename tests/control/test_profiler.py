from itertools import chain

import numpy as np
import pytest

from jaxmorph.control.profiler import Profile, Profiler
from jaxmorph.control.rank_times import rank_times
from jaxmorph.records import Link
from jaxmorph.schedule.costs import CopyCosts, StageCosts
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.timeline import CopySpan, Timeline, TransferSpan


def timeline(rows, transfers=()):
    """Ops one after another, each with its duration, as in `F0:2 BW0:5`."""
    parsed = [[word.split(":") for word in row.split()] for row in rows]
    ends = [np.cumsum([float(ms) for _, ms in row]) for row in parsed]
    starts = [end - [float(ms) for _, ms in row] for end, row in zip(ends, parsed, strict=True)]
    orders = tuple(tuple(Op.parse(name) for name, _ in row) for row in parsed)
    return Timeline(orders, tuple(starts), tuple(ends), tuple(transfers))


def profile(*timelines):
    profiler = Profiler(timelines[0].num_stages)
    for measured in timelines:
        profiler.observe(rank_times(measured))
    return profiler.profile()


def test_costs_are_medians_over_microbatches_and_then_over_steps():
    steps = [timeline([f"F0:{ms} F1:{ms} F2:90 B0:4 W0:1"]) for ms in (2, 3, 50)]
    assert profile(*steps).costs == StageCosts((3.0,), (4.0,), (1.0,))


def test_the_cost_of_w_is_that_of_one_microbatch_of_its_group():
    step = timeline(["F0:2 F1:2 F2:2 B0:4 B1:4 B2:4 W0-2:9"])
    assert profile(step).costs == StageCosts((2.0,), (4.0,), (3.0,))
    whole = profile(timeline(["F0:2 BW0:5"])).costs
    assert whole == StageCosts((2.0,), (5.0,), (0.0,))


def test_a_stages_cost_adds_up_its_chunks():
    rows = ["F0:2 F1:2 1.F0:3 1.F1:3 1.BW0:7 BW0:5", "F0:1 1.F0:1 1.BW0:1 BW0:1"]
    costs = profile(timeline(rows)).costs
    assert costs.forward_ms == (5.0, 2.0)
    assert costs.backward_input_ms == (12.0, 2.0)


def test_a_links_latency_is_timed_by_the_later_end():
    transfers = [
        TransferSpan(0, "activation[0] 0>1", 0.0, 7.0),
        TransferSpan(1, "activation[0] 0>1", 4.0, 7.0),
        TransferSpan(1, "gradient[0] 1>0", 10.0, 12.0),
        TransferSpan(0, "gradient[0] 1>0", 8.0, 12.0),
    ]
    state = profile(timeline(["F0:1", "F0:1"], transfers)).links[Link(0, 1)]
    assert (state.forward_latency_ms, state.backward_latency_ms) == (3.0, 2.0)


def test_a_profile_is_read_back_from_json():
    transfers = [TransferSpan(rank, "activation[0] 0>1", 0.0, 2.0) for rank in (0, 1)]
    made = profile(timeline(["F0:1 BW0:2", "F0:1 BW0:2"], transfers))
    assert Profile.from_json(made.to_json()) == made
    assert made.links[Link(0, 1)].forward_latency_ms == pytest.approx(2.0)


def test_an_earlier_versions_profile_is_read():
    data = profile(timeline(["F0:1 BW0:2"])).to_json() | {"spreads": {"costs": {}, "links": {}}}
    del data["copies"]
    assert Profile.from_json(data).costs.forward_ms == (1.0,)


def copies(*moved):
    """A step with copies as (stage, kind, duration)."""
    spans = tuple(CopySpan(stage, kind, 0, 0, 5.0, 5.0 + ms) for stage, kind, ms in moved)
    return Timeline(((),) * 3, (np.zeros(0),) * 3, (np.zeros(0),) * 3, copies=spans)


def test_copy_costs_are_medians_of_medians():
    steps = [
        copies(*[(0, "offload", value) for value in (ms, ms, 90.0)], (0, "fetch", 3))
        for ms in (4.0, 6.0, 50.0)
    ]
    assert profile(copies()).copies is None
    found = profile(*steps, copies()).copies  # the last step moved nothing
    assert found == CopyCosts((6.0,) * 3, (3.0,) * 3)
    found = profile(copies((0, "offload", 2), (2, "offload", 7), (2, "fetch", 1))).copies
    assert found == CopyCosts(
        (2.0, 7.0, 7.0), (1.0, 1.0, 1.0)
    )  # a stage without copies gets the slowest time


def test_a_change_of_route_clears_the_estimate():
    def steps(is_direct, took_ms):
        ends = (0, 1) if is_direct else (1,)
        label = "activation[0] 0>1"
        spans = [TransferSpan(end, label, 0.0, took_ms, holds_queue=is_direct) for end in ends]
        return [timeline(["F0:1", "F0:1"], spans)] * 3

    def latency_ms(*parts):
        return profile(*chain(*parts)).links[Link(0, 1)].forward_latency_ms

    assert latency_ms(steps(True, 1.0), steps(False, 30.0)[:1]) == 30.0
    assert latency_ms(steps(False, 30.0), steps(True, 1.0)[:1]) == 1.0
