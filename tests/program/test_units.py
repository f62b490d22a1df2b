"""A program cut into units is the program, and what may move is what nobody else's order needs."""

import pytest

from jaxmorph.program.instructions import Free, Payload, Receive, Run, Send
from jaxmorph.program.lowering import lower
from jaxmorph.program.units import units_of
from jaxmorph.schedule.builders import interleaved, one_forward_one_backward, zb_h2
from jaxmorph.schedule.costs import Link, StageCosts
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.simulator import simulate


def lowered(routes, schedule=None, num_tied=0):
    schedule = schedule or zb_h2(3, 4)
    costs = StageCosts.uniform(schedule.num_stages, 1.0, 1.0, 1.0)
    return lower(schedule, simulate(schedule, costs), routes, num_tied=num_tied)


ALL_DELEGATED = {Link(0, 1): "delegated", Link(1, 2): "delegated"}
MIXED = {Link(0, 1): "delegated"}


@pytest.mark.parametrize("routes", [ALL_DELEGATED, MIXED, {}])
@pytest.mark.parametrize("num_tied", [0, 1])
@pytest.mark.parametrize("make", [zb_h2, one_forward_one_backward])
def test_the_units_together_are_the_program(routes, num_tied, make):
    for program in lowered(routes, make(3, 4), num_tied=num_tied):
        units = units_of(program)
        together = [step for unit in units.planned for step in unit.instructions]
        assert (*together, *units.ending) == program.instructions
        assert [unit.op for unit in units.planned if unit.op] == list(program.ops())


def test_a_unit_has_its_ops_messages_in_front_and_what_it_sends_and_frees_behind():
    program = lowered(ALL_DELEGATED)[1]
    unit = next(unit for unit in units_of(program).planned if unit.op == Op(OpKind.B, 0))
    assert list(map(str, unit.receives)) == ["receive gradient[0] 2>1"]
    assert list(map(str, unit.steps)) == [
        "run B0",
        "free stash[0]",
        "free output-gradient[0]",
        "send gradient[0] 1>0",
        "free input-gradient[0]",
    ]
    assert list(map(str, unit.sends)) == ["send gradient[0] 1>0"]


def test_all_ops_are_movable_where_no_transfer_is_direct_else_w_alone():
    movable = [units_of(program).movable for program in lowered(MIXED)]
    assert movable == [frozenset(OpKind), frozenset({OpKind.W}), frozenset({OpKind.W})]


def test_a_direct_transfer_is_a_unit_of_its_own_that_keeps_its_place():
    units = units_of(lowered(MIXED)[1]).planned
    fixed = [step for unit in units if unit.op is None for step in unit.steps]
    assert all(isinstance(step, Send | Receive | Free) for step in fixed)
    assert sum(isinstance(step, Send | Receive) for step in fixed) == 8  # of link 1-2
    assert all(isinstance(unit.steps[0], Run) for unit in units if unit.op is not None)


@pytest.mark.parametrize("route", ["direct", "delegated"])
def test_tied_gradients_end_the_step_on_either_route_and_take_no_movement_away(route):
    for program in lowered({**ALL_DELEGATED, Link(0, 2): route}, num_tied=1):
        units = units_of(program)
        tied = [
            step
            for unit in units.planned
            for step in unit.instructions
            if isinstance(step, Send | Receive) and step.transfer.payload is Payload.TIED
        ]
        assert tied == []
        assert units.movable == frozenset(OpKind)


def test_with_several_chunks_nothing_is_movable():
    programs = lowered({Link(0, 1): "delegated"}, interleaved(2, 4, num_chunks=2))
    assert all(units_of(program).movable == frozenset() for program in programs)
