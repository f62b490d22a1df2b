"""No rule's schedule with given warm-ups is shorter than their bound, and many are as short."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.schedule.costs import Limits, StageCosts, chain_links
from jaxmorph.schedule.list_schedule import Rule, list_schedule
from jaxmorph.schedule.warmup_bound import WarmupBound
from jaxmorph.schedule.workload import make_workload

RULES = [
    Rule(backward_first=backward_first, weight_patience=patience)
    for backward_first in (False, True)
    for patience in (0.0, 0.5, 1.0)
]


def makespans(workload, warmup):
    made = (list_schedule(workload, rule, warmup, keep_warmup=True) for rule in RULES)
    return [each.makespan for each in made if each is not None]


@st.composite
def problems(draw):
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    times = st.tuples(*[st.sampled_from([0.0, 0.1, 1.0, 2.3, 5.5])] * stages)
    costs = StageCosts(draw(times), draw(times), draw(times))
    links = chain_links(draw(st.tuples(*[st.sampled_from([0.0, 0.7, 9.0])] * (stages - 1))))
    warmup = accumulate(draw(st.tuples(*[st.integers(1, microbatches)] * stages)), min)
    return make_workload(costs, links, Limits(), microbatches), tuple(warmup)


@given(problems())
def test_no_schedule_with_the_warmups_is_shorter(problem):
    workload, warmup = problem
    assert WarmupBound(workload).of(warmup) <= min(makespans(workload, warmup))


@pytest.mark.parametrize(
    ("latency_ms", "warmup", "bound_ms"),
    [
        (0.0, (7, 5, 3, 1), 390),  # nobody idles between its first op and its last
        (20.0, (11, 5, 3, 1), 410),
        (20.0, (4, 3, 2, 1), 430),  # three rounds of four, each of which waits for the link
    ],
)
def test_it_is_what_can_be_had(latency_ms, warmup, bound_ms):
    costs = StageCosts.uniform(4, 10.0, 10.0, 10.0)
    workload = make_workload(costs, chain_links((latency_ms, 0.0, 0.0)), Limits(), 12)
    assert WarmupBound(workload).of(warmup) == min(makespans(workload, warmup)) == bound_ms * 10**9
