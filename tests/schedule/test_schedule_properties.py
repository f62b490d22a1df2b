"""Properties that hold for every schedule, size, cost, link and cap."""

import json
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.config.sections import PLANNED_SCHEDULES
from jaxmorph.errors import UserError
from jaxmorph.schedule.bound import lower_bound_ms
from jaxmorph.schedule.costs import Limits, Links, StageCosts, StashBytes
from jaxmorph.schedule.fixed import FIXED_SCHEDULES
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.planner import fits, plan
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from tests.schedule.strategies import costs_of, limits_of, links_of

_MS = st.one_of(
    st.just(10.0), st.just(0.0), st.floats(0.0, 50.0, allow_subnormal=False), st.floats(1e-3, 1e3)
)

_NAMES = [*FIXED_SCHEDULES, *PLANNED_SCHEDULES]  # of one chunk


class _Case(NamedTuple):
    name: str
    num_microbatches: int
    costs: StageCosts
    links: Links
    limits: Limits

    def schedule(self) -> Schedule:
        return plan(self.costs, self.links, self.limits, self.num_microbatches, self.name).schedule


@st.composite
def _cases(draw, names=_NAMES) -> _Case:
    stages, microbatches = draw(st.integers(1, 7)), draw(st.integers(1, 20))
    name = draw(st.sampled_from(names))
    costs, links = draw(costs_of(stages, _MS)), draw(links_of(stages, _MS))
    limits = draw(limits_of(stages, 12, 9, 30)) if name in PLANNED_SCHEDULES else Limits()
    return _Case(name, microbatches, costs, links, limits)


@given(_cases())
def test_every_op_runs_once_after_what_it_needs(case):
    schedule = case.schedule()
    schedule.validate()
    kinds = "FBW" if schedule.splits_backward else ("F", "BW")
    expected = Counter(
        Op(OpKind(kind), microbatch)
        for kind in kinds
        for microbatch in range(case.num_microbatches)
    )
    for order in schedule.orders:
        assert Counter(order) == expected
        at = {op: position for position, op in enumerate(order)}
        for microbatch in range(case.num_microbatches):
            positions = [at[Op(OpKind(kind), microbatch)] for kind in kinds]
            assert positions == sorted(positions)
        for kind in kinds:
            ran = [op.microbatch for op in order if op.kind is OpKind(kind)]
            assert ran == list(range(case.num_microbatches))


def _most_held(order: tuple[Op, ...], after_forward: int, after_backward: int) -> int:
    """The most that a stage holds, summed over all microbatches after every op."""
    done: dict[int, OpKind] = {}
    most = 0
    for op in order:
        done[op.microbatch] = op.kind
        held = {OpKind.F: after_forward, OpKind.B: after_backward, OpKind.W: 0}
        most = max(most, sum(held[kind] for kind in done.values()))
    return most


@given(_cases(names=PLANNED_SCHEDULES))
def test_no_stage_holds_more_than_its_cap(case):
    orders, limits = case.schedule().orders, case.limits
    if limits.stash_bytes is not None and limits.max_stash_bytes is not None:
        caps = limits.max_stash_bytes
        sizes = (limits.stash_bytes.after_forward, limits.stash_bytes.after_backward_input)
    else:
        caps = limits.max_live or (case.num_microbatches,) * len(orders)
        until_weight = int(limits.live_until == "W")
        sizes = ((1,) * len(orders), (until_weight,) * len(orders))
    for order, cap, *size in zip(orders, caps, *sizes, strict=True):
        assert _most_held(order, *size) <= cap


@given(_cases())
def test_no_schedule_beats_the_bound(case):
    makespan_ms = simulate(case.schedule(), case.costs, case.links).makespan_ms
    bound_ms = lower_bound_ms(case.costs, case.num_microbatches, case.links, case.limits)
    assert makespan_ms >= bound_ms * (1 - 1e-12)


@given(
    _cases(names=["gpipe", "1f1b", "1f1b-eager"]),
    st.integers(1, 3),
    st.integers(0, 20),
    st.integers(1, 30),
)
def test_whole_backwards_are_planned_where_they_fit(case, after_forward, after_backward, room):
    stages = case.costs.num_stages
    sizes = StashBytes((after_forward,) * stages, (after_backward,) * stages)
    limits = Limits(max_stash_bytes=(room,) * stages, stash_bytes=sizes)
    if fits(case.schedule(), limits):
        assert case._replace(limits=limits).schedule() == case.schedule()
    else:
        with pytest.raises(UserError):
            case._replace(limits=limits).schedule()


@given(_cases(names=[*PLANNED_SCHEDULES, "zb-h1", "zb-h2"]), st.integers(2, 5))
def test_groups_of_w_keep_every_rule_and_cap(case, group):
    limits = replace(case.limits, weight_group=group)
    grouped = case._replace(limits=limits)
    count = case.num_microbatches
    waiting = min(group, count) - 1
    memory = limits.stage_memory(case.costs.num_stages, count)
    if any(max(f, b) + waiting * b > room for f, b, room in memory):
        with pytest.raises(UserError, match=r"one W computes|of one W keep"):
            grouped.schedule()
        return
    schedule = grouped.schedule()
    schedule.validate()
    assert fits(schedule, limits)
    groups = [range(count)[at : at + group] for at in range(0, count, group)]
    for order in schedule.orders:
        assert [op.microbatches for op in order if op.kind is OpKind.W] == groups
    assert Schedule.parse(str(schedule)) == schedule
    timeline = simulate(schedule, case.costs, case.links)
    alone = simulate(case.schedule(), case.costs, case.links)
    assert timeline.busy_ms == pytest.approx(alone.busy_ms)
    bound_ms = lower_bound_ms(case.costs, count, case.links, limits)
    assert timeline.makespan_ms >= bound_ms * (1 - 1e-12)


@given(_cases())
def test_planning_is_deterministic_and_round_trips(case):
    schedule = case.schedule()
    assert case.schedule() == schedule
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


@given(_cases())
def test_warm_ups_never_grow_along_the_pipeline(case):
    """Lemma 1."""
    warmup = case.schedule().warmup_forwards
    assert list(warmup) == sorted(warmup, reverse=True)
