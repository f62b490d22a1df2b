"""Ranks that change their order inside a step: whatever comes when, every step is completed.

The model has what a run has: hosts that hand over ahead of time, in-order queues, rendezvous of
direct transfers, slots, caps. Nothing real is slower to get wrong.
"""

from collections import Counter
from dataclasses import astuple
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.channels import channel_of
from jaxmorph.program.check import ProgramError
from jaxmorph.program.instructions import Payload, Receive, Routes, Send, Transfer
from jaxmorph.program.leeway import with_leeway
from jaxmorph.program.lowering import lower
from jaxmorph.program.online_replay import replay_online
from jaxmorph.program.slots_needed import slots_needed
from jaxmorph.schedule.builders import one_forward_one_backward, zb_h2
from jaxmorph.schedule.costs import Limits, Link, LinkState, StageCosts, chain_links
from jaxmorph.schedule.memory import StashBytes
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.simulator import simulate

_MS = st.integers(0, 80).map(float)
_OP_MS = st.integers(1, 20).map(float)


class Case(NamedTuple):
    programs: tuple
    costs: StageCosts
    links: dict
    memory: tuple
    planned: tuple
    seed: int

    @property
    def expected(self):
        return simulate_blocking(self.programs, self.costs, self.links)

    def free(self):
        return with_leeway(self.programs, self.expected, self.memory)

    def random_ms(self, most_ms):
        """Delays between none and a multiple of the planned ones, and now and then a long one."""
        random = np.random.default_rng(self.seed)

        def delay_ms(transfer, now_ms):
            del now_ms
            spike_ms = 500.0 if most_ms > 1 and random.random() < 0.05 else 0.0
            return planned_ms(self.links, transfer) * most_ms * random.random() + spike_ms

        return delay_ms


def planned_ms(links, transfer):
    state = links[transfer.link]
    up = transfer.source < transfer.destination
    return state.forward_latency_ms if up else state.backward_latency_ms


@st.composite
def _limits(draw, stages):
    kind = draw(st.sampled_from(["none", "B", "W", "bytes"]))
    if kind == "none":
        return Limits()
    if kind != "bytes":
        return Limits(draw(st.tuples(*[st.integers(1, 6)] * stages)), kind)
    sizes = [draw(st.tuples(*[st.integers(0, 5)] * stages)) for _ in range(2)]
    room = draw(st.tuples(*[st.integers(0, 20)] * stages))
    caps = tuple(max(values) for values in zip(room, *sizes, strict=True))
    return Limits(max_stash_bytes=caps, stash_bytes=StashBytes(*sizes))


@st.composite
def cases(draw, names=("adaptive", "paper", "zb-h2", "1f1b"), routes=("direct", "delegated")):
    stages, microbatches = draw(st.integers(2, 5)), draw(st.integers(1, 7))
    costs = StageCosts(*(draw(st.tuples(*[_OP_MS] * stages)) for _ in range(3)))
    links = {Link(lower, lower + 1): LinkState(draw(_MS), draw(_MS)) for lower in range(stages - 1)}
    name = draw(st.sampled_from(names))
    limits = draw(_limits(stages)) if name in ("adaptive", "paper") else Limits()
    schedule = plan(costs, links, limits, microbatches, name).schedule
    num_tied = draw(st.integers(0, 1))
    ways = {link: draw(st.sampled_from(routes)) for link in [*links, Link(0, stages - 1)]}
    programs = lower(schedule, simulate(schedule, costs, links), ways, num_tied=num_tied)
    links.setdefault(Link(0, stages - 1), LinkState())
    memory = limits.stage_memory(stages, microbatches)
    return Case(programs, costs, links, memory, schedule.orders, draw(st.integers(0, 2**31)))


def check_step(case, timeline):
    """Every op once, those of a kind in order, F before B before W, and never too much held."""
    for rank, order in enumerate(timeline.orders):
        assert Counter(order) == Counter(case.planned[rank])
        for kind in OpKind:
            of_kind = [op.microbatch for op in order if op.kind is kind]
            assert of_kind == sorted(of_kind)
        position = {op: at for at, op in enumerate(order)}
        for op in order:
            if op.kind is OpKind.W:
                assert position[op] > position[Op(OpKind.B, op.microbatch)]
            elif op.kind is not OpKind.F:
                assert position[op] > position[Op(OpKind.F, op.microbatch)]
        room = max(case.memory[rank].room, case.memory[rank].peak(case.planned[rank]))
        assert case.memory[rank].peak(order) <= room


@given(cases(), st.booleans())
def test_every_step_is_completed_within_its_memory_whatever_comes_when(case, left_plan):
    slots = slots_needed(case.programs)
    timeline = replay_online(
        case.free(), case.costs, case.random_ms(3.0), slots, left_plan=left_plan
    )
    check_step(case, timeline)


@given(cases(routes=("delegated",)))
def test_on_delegated_routes_one_slot_for_each_channel_is_enough_never_to_end_in_a_deadlock(case):
    slots = dict.fromkeys(slots_needed(case.programs), 1)
    check_step(case, replay_online(case.free(), case.costs, case.random_ms(3.0), slots))


@given(cases())
def test_with_nothing_late_the_order_is_exactly_the_planned_one(case):
    slots = slots_needed(case.programs)
    for delay_ms in (case.random_ms(1.0), lambda transfer, _: planned_ms(case.links, transfer)):
        timeline = replay_online(case.free(), case.costs, delay_ms, slots)
        assert timeline.orders == case.planned


@given(cases(), st.integers(0, 4), st.floats(0.5, 4.0))
def test_a_stage_that_computes_slower_keeps_the_planned_order_where_no_link_is_late(
    case, slow, times
):
    """The others, who can't know why its messages are late, keep it by having no leeway."""
    rank = slow % len(case.programs)
    programs = [
        free if number == rank else program
        for number, (free, program) in enumerate(zip(case.free(), case.programs, strict=True))
    ]
    random = np.random.default_rng(case.seed)
    row = np.where(np.arange(len(case.programs)) == rank, times, 1.0)
    costs = StageCosts(*(tuple(row * of_kind) for of_kind in astuple(case.costs)))
    timeline = replay_online(
        programs,
        costs,
        lambda transfer, _: planned_ms(case.links, transfer) * random.uniform(0.0, 1.0),
        slots_needed(case.programs),
    )
    assert timeline.orders == case.planned


@given(cases())
def test_without_leeway_a_step_takes_as_long_as_its_programs_do_on_their_queues(case):
    timeline = replay_online(
        case.programs, case.costs, lambda transfer, _: planned_ms(case.links, transfer)
    )
    expected = case.expected
    assert timeline.orders == expected.orders
    for rank in range(len(case.programs)):
        np.testing.assert_allclose(timeline.end_ms[rank], expected.end_ms[rank])


@given(cases())
def test_a_rank_with_a_direct_link_moves_w_alone(case):
    timeline = replay_online(case.free(), case.costs, case.random_ms(3.0))
    for rank, program in enumerate(case.programs):
        routes = {
            step.route
            for step in program.instructions
            if isinstance(step, Send | Receive) and step.transfer.payload is not Payload.TIED
        }
        if "direct" in routes:
            kept, planned = (
                [op for op in order if op.kind is not OpKind.W]
                for order in (timeline.orders[rank], case.planned[rank])
            )
            assert kept == planned


COSTS = StageCosts.uniform(3, 10.0, 10.0, 10.0)
DELEGATED: Routes = {Link(0, 1): "delegated", Link(1, 2): "delegated"}


def slow_from(now_ms, late_ms=60.0):
    """Messages between the last two ranks are late from a time on."""

    def delay_ms(transfer, sent_ms):
        return late_ms if transfer.link == Link(1, 2) and sent_ms >= now_ms else 0.0

    return delay_ms


def steps_ms(schedule, routes, delay_ms):
    """How long a step takes in the planned order, and with leeway."""
    programs = lower(schedule, simulate(schedule, COSTS), routes)
    expected = simulate_blocking(programs, COSTS)
    memory = Limits().stage_memory(3, schedule.num_microbatches)
    free = with_leeway(programs, expected, memory)
    return [replay_online(each, COSTS, delay_ms).makespan_ms for each in (programs, free)]


def test_a_link_that_turns_slow_in_the_middle_of_a_step_costs_less_with_leeway():
    kept_ms, free_ms = steps_ms(zb_h2(3, 9), DELEGATED, slow_from(100.0))
    assert free_ms < 0.75 * kept_ms


@pytest.mark.parametrize(
    ("max_live", "held", "step_ms"), [(None, (6, 6, 1), 344.0), ((5, 3, 1), (5, 3, 1), 444.0)]
)
def test_without_a_cap_a_rank_may_hold_more_than_its_plan_and_with_one_it_does_not(
    max_live, held, step_ms
):
    schedule = zb_h2(3, 9)
    programs = lower(schedule, simulate(schedule, COSTS), DELEGATED)
    memory = Limits(max_live).stage_memory(3, 9)
    free = with_leeway(programs, simulate_blocking(programs, COSTS), memory)
    timeline = replay_online(free, COSTS, slow_from(100.0))
    assert simulate(schedule, COSTS).peak_live() == (5, 3, 1)
    assert timeline.peak_live() == held
    assert timeline.makespan_ms == pytest.approx(step_ms)


def test_ranks_with_a_direct_link_gain_by_moving_w():
    routes: Routes = {Link(1, 2): "delegated"}
    kept_ms, free_ms = steps_ms(zb_h2(3, 9), routes, slow_from(100.0))
    assert free_ms < kept_ms


def test_where_every_link_is_direct_no_rank_has_leeway():
    schedule = one_forward_one_backward(3, 4)
    planned = simulate(schedule, COSTS, chain_links([1.0, 1.0]))
    memory = Limits().stage_memory(3, 4)
    programs = with_leeway(lower(schedule, planned), planned, memory)
    assert all(program.leeway is None for program in programs)


def test_ranks_that_wait_for_each_other_for_ever_are_an_error():
    schedule = zb_h2(3, 2)
    programs = lower(schedule, simulate(schedule, COSTS), DELEGATED)
    channel = channel_of(Transfer(Payload.ACTIVATION, 0, 1, 0))
    with pytest.raises(ProgramError, match="deadlock: rank 0, 1, 2 can't go on"):
        replay_online(programs, COSTS, lambda *_: 0.0, {channel: 0})
