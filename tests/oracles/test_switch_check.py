"""A step completes wherever the direct path of one of its links fails."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.config.sections import PLANNED_SCHEDULES
from jaxmorph.program.check import ProgramError
from jaxmorph.program.instructions import Receive, Send, SendReceive, Transfer
from jaxmorph.program.lowering import lower
from jaxmorph.records import Link
from jaxmorph.schedule.costs import Limits, StageCosts, chain_links
from jaxmorph.schedule.fixed import FIXED_SCHEDULES, interleaved
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.simulate import simulate
from tests.oracles.switch_check import check_every_switch, check_switch


def lowered(name, stages, microbatches, routes=None, num_tied=0, slow_ms=0.0, pairs=None):
    costs = StageCosts.uniform(stages, 10, 10, 10)
    links = chain_links([slow_ms, *[0.0] * (stages - 2)])
    schedule = (
        interleaved(stages, microbatches, 2)
        if name == "interleaved"
        else plan(costs, links, Limits(), microbatches, name).schedule
    )
    planned = simulate(schedule, costs, links)
    return lower(schedule, planned, routes, num_tied=num_tied, pairs=pairs)


def direct_sends(programs):
    steps = (step for program in programs for step in program.instructions)
    sends = [step for step in steps if isinstance(step, Send | SendReceive)]
    return [step for step in sends if step.route == "direct"]


@given(
    name=st.sampled_from([*FIXED_SCHEDULES, *PLANNED_SCHEDULES, "interleaved", "zb-v"]),
    stages=st.integers(2, 4),
    rounds=st.integers(1, 3),
    num_tied=st.integers(0, 2),
    slow_ms=st.sampled_from([0.0, 25.0]),
    delegated=st.sets(st.integers(0, 2)),
    pairs=st.booleans(),
)
def test_every_schedule_survives_a_link_failure(
    name, stages, rounds, num_tied, slow_ms, delegated, pairs
):
    routes = {Link(low, low + 1): "delegated" for low in delegated if low + 1 < stages}
    programs = lowered(name, stages, rounds * stages, routes, num_tied, slow_ms, pairs)
    replayed = check_every_switch(programs)
    assert replayed == 2 * len(direct_sends(programs))


def test_a_lost_message_is_found():
    programs = lowered("1f1b", 2, 2, pairs=False)
    lost = Transfer.parse("gradient[1] 1>0")
    first = replace(
        programs[0],
        instructions=tuple(
            step
            for step in programs[0].instructions
            if not (isinstance(step, Receive) and step.transfer == lost)
        ),
    )
    with pytest.raises(ProgramError, match=r"lost gradient\[1\] 1>0|rank 1 waits at send"):
        check_switch((first, programs[1]), Link(0, 1))
