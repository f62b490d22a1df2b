import json

import pytest

from jaxmorph.bookkeeping import Bookkeeper
from jaxmorph.config import Config
from jaxmorph.control.profiler import Profile, Profiler
from jaxmorph.planning import PlanInForce
from jaxmorph.runtime.rendezvous import DETAIL
from jaxmorph.runtime.report import StepTotals
from jaxmorph.schedule.costs import Limits, StageCosts
from jaxmorph.schedule.planner import plan
from jaxmorph.step_programs import lower_step

COSTS = StageCosts.uniform(1, 1.0, 1.0, 1.0)
PLAN = plan(COSTS, {}, Limits(), 1, "zb-h2")
IN_FORCE = PlanInForce(PLAN, lower_step(PLAN.schedule, Profile(COSTS, {})), rank=0)


def _report(forward_ms: float) -> dict:
    ops = [["F0", 0.0, forward_ms], ["B0", forward_ms, 20.0], ["W0", 20.0, 30.0]]
    return {"compilations": 0, DETAIL: json.dumps({"ops": ops, "transfers": []})}


@pytest.fixture
def told():
    """What rank 0 tells of four steps, every second of which is sampled; F grows by 1 ms each."""
    config = Config.model_validate({"run": {"steps": 4}, "trace": {"every_steps": 2}})
    messages = []
    with Bookkeeper(config, IN_FORCE, Profiler(1), messages.append, active=True) as bookkeeper:
        for step in range(4):
            report = _report(10.0 + step)
            bookkeeper.note(step, StepTotals(1.0, 1.0), [report], 0.03)
    return messages


def test_sampled_steps_and_the_last_one_tell_what_ops_cost_by_then(told):
    kinds = [message["kind"] for message in told]
    step = ["step", "timelines", "profile"]
    assert kinds == [*step, "step", *step, *step]
    profiles = [
        Profile.from_json(message["profile"]) for message in told if message["kind"] == "profile"
    ]
    assert [profile.costs.forward_ms for profile in profiles] == [(10.0,), (11.0,), (11.5,)]
