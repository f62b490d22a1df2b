"""Plans that offload stashes, simulated at the paper's scale: their gain and their cost."""

from dataclasses import replace
from functools import partial

import pytest

from jaxmorph.config import Config
from jaxmorph.control.offload_planning import with_sampled_copies
from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step
from jaxmorph.errors import UserError
from jaxmorph.plain_json import dump, parse_line
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.offload import count_offloads
from jaxmorph.program.slots_needed import HostRoom
from jaxmorph.records import Link
from jaxmorph.schedule.costs import CopyCosts, LinkDelay, StageCosts, StashBytes
from jaxmorph.schedule.planner import Plan
from jaxmorph.schedule.timeline import Timeline, peak_on_device
from jaxmorph.training.plan_in_force import plan_step, unmeasured_profile

# The paper's op times; a stash of about 1 GB at 50 GB/s.
SEVEN_B = StageCosts((8.4, 9.2, 9.05, 9.4), (9.5, 10.1, 10.0, 9.2), (5.3, 6.4, 6.35, 5.9))
FOURTEEN_B = StageCosts(
    (8.0, *[9.0] * 7), (10.0, *[10.0] * 6, 9.0), (5.0, *[6.0] * 7)
)  # fmt: skip
COPY_MS = 20.0


def config(costs: StageCosts, *, offload: bool, **schedule) -> Config:
    return Config.model_validate({
        "parallelism": {"stages": costs.num_stages},
        "batch": {"microbatches": 3 * costs.num_stages},
        "routes": {"default": "delegated"},
        "schedule": schedule,
        "offload": {"enabled": offload},
    })  # fmt: skip


def profile(
    costs: StageCosts, slow: Link, copy_ms: float = COPY_MS, link_ms: float = 60
) -> Profile:
    copies = CopyCosts.uniform(costs.num_stages, copy_ms)
    return Profile(costs, {slow: LinkDelay(link_ms, link_ms)}, copies=copies)


def simulated(plan: Plan, known: Profile) -> tuple[Timeline, int]:
    """The simulated step, and the number of stashes that it offloads."""
    programs = lower_step(plan.schedule, known, plan.routes, 0, plan.offloading)
    timeline = simulate_blocking(programs, known.costs, known.links, copies=known.copies)
    return timeline, count_offloads(programs)


@pytest.mark.parametrize(
    ("costs", "slow"),
    [(SEVEN_B, Link(2, 3)), (SEVEN_B, Link(0, 1)), (FOURTEEN_B, Link(6, 7))],
    ids=["7B 2-3", "7B 0-1", "14B 6-7"],
)
def test_a_cap_of_2s_minus_1_costs_3_percent(costs, slow):
    known, budget = profile(costs, slow), 2 * costs.num_stages - 1
    free, _ = simulated(plan_step(config(costs, offload=False), known), known)
    capped, _ = simulated(plan_step(config(costs, offload=False, max_live=budget), known), known)
    made = plan_step(config(costs, offload=True, max_live=budget), known)
    step, moved = simulated(made, known)
    assert max(peak_on_device(step)) <= budget < max(step.peak_live())
    assert step.makespan_ms <= 1.03 * free.makespan_ms < capped.makespan_ms
    assert moved > 0
    assert f"{moved} stashes of a step go to host memory and back" in made.reason
    assert made.predicted_step_s == pytest.approx(step.makespan_ms / 1e3)
    assert parse_line(Plan, dump(made), "a plan") == made


def test_the_plan_with_the_fewest_copies_wins():
    known = profile(SEVEN_B, Link(0, 1))
    made = plan_step(config(SEVEN_B, offload=True, max_live=7), known)
    step, moved = simulated(made, known)
    assert moved == sum(max(0, live - 7) for live in step.peak_live())
    rooms = made.offloading
    assert rooms is not None
    others = [replace(made, offloading=replace(rooms, spare=spare)) for spare in (1, 2)]
    quicker = [simulated(other, known) for other in others]
    assert all(more > moved for _, more in quicker)
    assert min(other.makespan_ms for other, _ in quicker) > 0.995 * step.makespan_ms


def test_a_plan_that_fits_offloads_nothing():
    known = profile(SEVEN_B, Link(2, 3))
    for limits in ({"max_live": 12}, {}):
        made = plan_step(config(SEVEN_B, offload=True, **limits), known)
        assert made == plan_step(config(SEVEN_B, offload=False), known)
        assert made.offloading is None


def test_expensive_copies_are_not_made():
    known = profile(SEVEN_B, Link(2, 3), copy_ms=500)
    made = plan_step(config(SEVEN_B, offload=True, max_live=7), known)
    assert made == plan_step(config(SEVEN_B, offload=False, max_live=7), known)


def test_a_fixed_schedule_is_made_to_fit():
    known = profile(SEVEN_B, Link(2, 3), copy_ms=5, link_ms=0)
    capped = {"name": "zb-h2", "max_live": 4}
    with pytest.raises(UserError, match="zb-h2 holds 7"):
        plan_step(config(SEVEN_B, offload=False, **capped), known)
    made = plan_step(config(SEVEN_B, offload=True, **capped), known)
    free = plan_step(config(SEVEN_B, offload=False, name="zb-h2"), known)
    step, _ = simulated(made, known)
    assert made.schedule == free.schedule
    assert max(peak_on_device(step)) == 4
    assert step.makespan_ms <= 1.01 * simulated(free, known)[0].makespan_ms


def test_only_stages_over_their_cap_offload():
    known = profile(SEVEN_B, Link(2, 3), copy_ms=5, link_ms=0)
    made = plan_step(config(SEVEN_B, offload=True, name="zb-h2", max_live=[3, 5, 3, 1]), known)
    programs = lower_step(made.schedule, known, made.routes, 0, made.offloading)
    assert [count_offloads([program]) > 0 for program in programs] == [True, False, False, False]


def test_an_impossible_cap_names_stage_and_need():
    known = profile(SEVEN_B, Link(2, 3))
    held_until_w = config(SEVEN_B, offload=True, name="zb-h2", max_live=2, live_until="W")
    with pytest.raises(
        UserError, match=r"^offload: stage \d: got room for 2, expected at least [3-9]"
    ):
        plan_step(held_until_w, known)


def test_short_host_memory_is_named_as_the_cause():
    known = Profile(SEVEN_B, {}, StashBytes((100,) * 4, (0,) * 4), CopyCosts.uniform(4, 1.0))
    asked = config(SEVEN_B, offload=True, name="1f1b", max_stash_bytes=350)
    room = HostRoom({}, stash_bytes=(99,) * 4)
    with pytest.raises(UserError, match=r"^offload: 1f1b keeps 300 B of .* limits.host_gib"):
        plan_step(asked, known, room=room)


def test_a_cap_in_bytes_uses_the_stages_sizes():
    sizes = StashBytes((100, 100, 100, 60), (10, 10, 10, 10))
    known = Profile(SEVEN_B, {}, sizes, copies=CopyCosts.uniform(4, 1.0))
    made = plan_step(config(SEVEN_B, offload=True, name="1f1b", max_stash_bytes=350), known)
    step, moved = simulated(made, known)
    assert moved > 0
    assert max(peak_on_device(step)) == 3
    assert step.peak_live()[0] == 4


def test_stashes_for_w_stay_on_the_device():
    sizes = StashBytes((100,) * 4, (60,) * 4)
    slow = {Link(2, 3): LinkDelay(60.0, 60.0)}
    known = Profile(SEVEN_B, slow, sizes, copies=CopyCosts.uniform(4, COPY_MS))
    free, capped, made = (
        simulated(plan_step(config(SEVEN_B, offload=offload, max_stash_bytes=cap), known), known)[0]
        for offload, cap in ((False, None), (False, 700), (True, 700))
    )
    assert free.makespan_ms < made.makespan_ms < capped.makespan_ms
    assert made.makespan_ms - free.makespan_ms < 0.2 * (capped.makespan_ms - free.makespan_ms)


def test_unmeasured_stages_offload_some_stashes():
    asked = config(SEVEN_B, offload=True)
    assert unmeasured_profile(asked).copies == CopyCosts.uniform(4, 1.0)
    assert unmeasured_profile(config(SEVEN_B, offload=False)).copies is None
    made = plan_step(asked, unmeasured_profile(asked))
    lowered = partial(lower_step, made.schedule, unmeasured_profile(asked), made.routes)
    programs = with_sampled_copies(lowered())
    assert [count_offloads([program]) for program in programs] == [2] * 4
    assert with_sampled_copies(programs) == programs
