"""What a round's books make of direct paths that fail in it."""

import json
from typing import Any

from jaxmorph.comparison.detecting_rounds import MorphBooks
from jaxmorph.control.profiler import Profile
from jaxmorph.planning.plan_in_force import PlanInForce
from jaxmorph.planning.step_programs import lower_step
from jaxmorph.runtime.rendezvous import DETAIL
from jaxmorph.schedule.costs import Limits, Link, StageCosts
from jaxmorph.schedule.planner import plan

COSTS = StageCosts.uniform(2, 1.0, 1.0, 1.0)
PLAN = plan(COSTS, {}, Limits(), 1, "zb-h2")
IN_FORCE = PlanInForce(PLAN, lower_step(PLAN.schedule, Profile(COSTS, {}), PLAN.routes), 0)
LINK = Link(0, 1)


class Loop:
    """What a control loop is told."""

    def __init__(self):
        self.seen, self.begun = [], []

    def observe(self, step, timeline, samples, probes, paths):
        self.seen.append((step, [each.link for each in paths.failures], len(samples)))
        return []

    def begin_again(self, links):
        self.begun += links


def reports(**told):
    """Both ranks' reports of a step in which one message held both queues."""
    held = [["activation[0] 0>1", 1.0, 2.0]]
    timings = {"ops": [["F0", 0.0, 1.0]], "transfers": held, "arrivals": [], "events": []}
    return [{"compilations": 0, DETAIL: json.dumps(timings)} | told for _ in range(2)]


def test_a_failure_is_counted_once_and_what_goes_by_hosts_is_no_measure():
    loop: Any = Loop()
    books = MorphBooks(IN_FORCE, loop)
    books.note(0, reports())
    books.note(1, reports(link_failures=[{"link": "0-1", "detail": "no answer in 3 s"}]))
    books.note(2, reports())
    books.begin_again([LINK])
    books.note(3, reports())
    books.finish()
    assert loop.seen == [(0, [], 1), (1, [LINK], 0), (2, [], 0), (3, [], 1)]
    assert loop.begun == [LINK]
    assert books.events == {"link_failed": 1, "link_restored": 1}
