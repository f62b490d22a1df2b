"""The process beside training: asked as rank 0 asks it, and as it answers without being started."""

import io
import json
from dataclasses import replace

import pytest

from jaxmorph.adapting.planning_client import PlanningError, PlanningProcess
from jaxmorph.adapting.planning_process import serve
from jaxmorph.config import Config
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.profiler import Profile
from jaxmorph.control.verdicts import Evidence, LinkHealth, Verdict
from jaxmorph.planning.plan_in_force import plan_step
from jaxmorph.planning.step_programs import lower_step
from jaxmorph.program.program_text import parse_program
from jaxmorph.schedule.costs import Link, StageCosts, chain_links
from jaxmorph.schedule.memory import StashBytes

CONFIG = Config.model_validate(
    {"parallelism": {"stages": 3}, "batch": {"microbatches": 6}, "schedule": {"name": "zb-h2"}}
)
USUAL: UsualLinks = {"direct": chain_links((0.0, 0.0)), "delegated": chain_links((1.0, 1.0))}
PROFILE = Profile(StageCosts.uniform(3, 10.0, 10.0, 10.0), USUAL["direct"])
FIRST = plan_step(CONFIG, PROFILE)
EVIDENCE = Evidence((30.0, 31.0), 0.5, 0.1, 5.5)
SLOW = [Verdict(*way, LinkHealth.SLOW, 30.0, 0.0, 6, EVIDENCE, "slow") for way in ((1, 2), (2, 1))]


@pytest.mark.multiprocess
@pytest.mark.timeout(60)
def test_the_process_plans_what_is_lowered_elsewhere_alike_and_ends_when_nobody_can_ask():
    process = PlanningProcess()
    try:
        with pytest.raises(PlanningError, match="asked before it was told what runs"):
            process.weigh(PROFILE, SLOW)
        process.begin(CONFIG, 1, FIRST, PROFILE, USUAL)
        options = process.weigh(PROFILE, SLOW)
        assert options.in_force_ms > 1.5 * options.undisturbed_ms
        chosen = options.candidates[1]
        assert chosen.plan.schedule == FIRST.schedule
        assert chosen.plan.routes == {Link(0, 1): "direct", Link(1, 2): "delegated"}
        adopted = process.adopt(1)
        programs = tuple(map(parse_program, adopted.programs))
        told = Profile(PROFILE.costs, chain_links((0.0, 31.0)))
        assert programs == lower_step(FIRST.schedule, told, chosen.plan.routes, num_tied=1)
        ways = {(channel.source, channel.destination) for channel in adopted.slots}
        assert ways == {(1, 2), (2, 1)}
        assert process.end() == 0  # as it ends when the process that has started it does
        with pytest.raises(PlanningError, match="the planning process is gone"):
            process.weigh(PROFILE, SLOW)
    finally:
        process.close()


@pytest.mark.timeout(60)
def test_a_process_that_died_between_two_requests_is_told_of_and_closed():
    process = PlanningProcess()
    try:
        process._process.kill()
        process._process.wait(30)
        with pytest.raises(PlanningError, match="the planning process is gone"):
            process.begin(CONFIG, 1, FIRST, PROFILE, USUAL)
        process.restart(FIRST)  # another one takes its place
        assert process.weigh(PROFILE, SLOW).in_force_ms > 0
        slow = process.weigh(PROFILE, SLOW).candidates[1]
        adopted = process.adopt(1)
        morphed = process.weigh(PROFILE, SLOW)
        process.restart(slow.plan, adopted.programs)
        again = process.weigh(PROFILE, SLOW)
        assert again.in_force_ms == morphed.in_force_ms
    finally:
        process.close()  # what it never read is of no interest to anyone
    with pytest.raises(PlanningError, match="has been closed"):
        process.restart(FIRST)


@pytest.mark.multiprocess
@pytest.mark.timeout(60)
def test_it_plans_within_what_devices_of_tens_of_gigabytes_have_free():
    schedule = CONFIG.schedule.model_copy(update={"max_stash_bytes": (60 * 10**9,) * 3})
    adaptation = CONFIG.adaptation.model_copy(update={"enabled": True})
    config = CONFIG.model_copy(update={"schedule": schedule, "adaptation": adaptation})
    profile = replace(PROFILE, stash_bytes=StashBytes((8 * 10**9,) * 3, (4 * 10**9,) * 3))
    first = plan_step(CONFIG, profile)
    process = PlanningProcess()
    try:
        process.begin(config, 0, first, profile, USUAL)
        candidates = process.weigh(profile, SLOW).candidates
    finally:
        process.close()
    anew = candidates[-1].plan.schedule
    assert anew.name == "adaptive"
    assert max(anew.peak_live("B")) <= 60 // 8


def test_a_request_that_goes_wrong_is_answered_and_so_is_the_next_one():
    requests = [{"kind": "sing"}, {"kind": "weigh", "profile": {}, "verdicts": [], "held": []}, {}]
    answers = io.StringIO()
    serve(iter(map(json.dumps, requests)), answers)
    errors = [json.loads(line)["error"] for line in answers.getvalue().splitlines()]
    assert errors == [
        "ValueError: a request of no known kind: sing",
        "ValueError: asked before it was told what runs",
        "ValueError: a request of no known kind: None",
    ]
