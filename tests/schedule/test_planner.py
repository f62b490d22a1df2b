from dataclasses import replace

import pytest

from jaxmorph.control.answer import solve
from jaxmorph.errors import UserError
from jaxmorph.plain_json import dump, parse_line
from jaxmorph.records import Link
from jaxmorph.schedule.costs import Limits, StageCosts, StashBytes, chain_links
from jaxmorph.schedule.fixed import gpipe, interleaved
from jaxmorph.schedule.planner import SCHEDULE_NAMES, Plan, plan, require_feasible, require_room
from jaxmorph.schedule.problem import parse_problem
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate

EQUAL = StageCosts.uniform(4, 10.0, 10.0, 10.0)
LATENCIES = (0.0, 5.0, 10.0, 15.0, 20.0, 30.0)


def _slow(link: int, latency_ms: float):
    return chain_links([latency_ms if at == link else 0.0 for at in range(3)])


@pytest.mark.parametrize(
    ("link", "makespans_ms"),
    [
        (0, [390.0, 395.0, 400.0, 410.0, 440.0, 500.0]),
        (1, [390.0, 395.0, 400.0, 430.0, 470.0, 550.0]),
        (2, [390.0, 395.0, 400.0, 440.0, 480.0, 560.0]),
    ],
)
def test_the_healthy_plan_replays_as_in_figure_5(link, makespans_ms):
    healthy = plan(EQUAL, {}, Limits(), 12, "paper").schedule
    replayed = [simulate(healthy, EQUAL, _slow(link, c)).makespan_ms for c in LATENCIES]
    assert replayed == makespans_ms


@pytest.mark.parametrize(
    ("link", "warmup"), [(0, (11, 5, 3, 1)), (1, (11, 9, 3, 1)), (2, (11, 9, 7, 1))]
)
def test_a_plan_for_a_slow_link_pays_latency_once(link, warmup):
    steps = [plan(EQUAL, _slow(link, c), Limits(), 12) for c in (10.0, 20.0, 30.0)]
    assert [step.predicted_step_s for step in steps] == [0.4, 0.41, 0.42]
    assert [step.lower_bound_s for step in steps] == [0.4, 0.41, 0.42]
    assert steps[1].schedule.warmup_forwards == warmup


@pytest.mark.parametrize(
    ("limits", "group", "says"),
    [
        (Limits((3,) * 4, "W"), 3, None),
        (Limits((3,) * 4, "B"), 12, None),
        (Limits((3,) * 4, "W"), 4, "max_live[0]: got 3 until W on stage 0, expected at least 4, as "
         "one W computes 4 microbatches"),
        (Limits(None, "W"), 20, None),
        (Limits(max_stash_bytes=(30,) * 4, stash_bytes=StashBytes((10,) * 4, (7,) * 4)), 3, None),
        (Limits(max_stash_bytes=(30,) * 4, stash_bytes=StashBytes((10,) * 4, (7,) * 4)), 4,
         "max_stash_bytes[0]: got 30 bytes, expected at least 31, which 4 microbatches of one W "
         "keep on stage 0: 1 short"),
    ],
)  # fmt: skip
def test_a_group_of_w_needs_room_for_all_its_stashes(limits, group, says):
    limits = replace(limits, weight_group=group)
    if says is None:
        require_room(plan(EQUAL, {}, limits, 12).schedule, limits)
    else:
        with pytest.raises(UserError) as caught:
            plan(EQUAL, {}, limits, 12)
        assert str(caught.value).startswith(says)


def test_the_shortest_of_several_schedules_is_put_in_groups():
    """Where the adaptive plan's own order suits no groups, another's does."""
    for group in (2, 3, 4, 6):
        limits = Limits(weight_group=group)
        steps_s = [
            plan(EQUAL, {}, limits, 12, name).predicted_step_s for name in ("zb-h2", "initial")
        ]
        assert plan(EQUAL, {}, limits, 12).predicted_step_s <= min(steps_s)


@pytest.mark.parametrize("limits", [Limits(), Limits((4, 3, 2, 1), "W")])
def test_whole_backwards_have_no_groups(limits):
    grouped = plan(EQUAL, {}, replace(limits, weight_group=3), 12, "1f1b").schedule
    assert grouped == plan(EQUAL, {}, limits, 12, "1f1b").schedule


@pytest.mark.parametrize("link_ms", [0.0, 100.0])
def test_a_cap_that_holds_all_microbatches_costs_groups_nothing(link_ms):
    links = _slow(1, link_ms)
    free, capped = (
        plan(EQUAL, links, Limits(caps, "W", weight_group=4), 12) for caps in (None, (12,) * 4)
    )
    assert capped.predicted_step_s == free.predicted_step_s


def test_under_a_tight_cap_the_microbatches_of_a_group_go_together():
    limits = Limits((4,) * 4, "W", weight_group=4)
    planned = plan(EQUAL, {}, limits, 12)
    assert planned.predicted_step_s == 0.54
    assert max(planned.schedule.peak_live("W")) == 4
    row = "F0 F1 F2 F3 B0 B1 B2 B3 W0-3 F4 F5 F6 F7 B4 B5 B6 B7 W4-7"
    assert " ".join(map(str, planned.schedule.orders[0][:18])) == row


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_plan_goes_through_json_unchanged(name):
    planned = plan(EQUAL, _slow(1, 20.0), Limits(weight_group=2), 12, name)
    assert parse_line(Plan, dump(planned), "a plan") == planned
    assert planned.schedule.name == name
    assert set(planned.routes) == {Link(0, 1), Link(1, 2), Link(2, 3)}


@pytest.mark.parametrize(
    ("warmup", "origin"), [(None, "by Equation 1, within the caps"), ((7, 5, 3, 1), "as given")]
)
def test_the_reason_names_the_warm_ups(warmup, origin):
    planned = plan(EQUAL, {}, Limits(), 12, "paper", warmup)
    assert planned.schedule.warmup_forwards == (7, 5, 3, 1)
    assert planned.reason == (
        f"warm-up forwards at least 7 5 3 1 {origin}; then B before F before W"
    )


@pytest.mark.parametrize(
    ("warmup", "caps", "message"),
    [
        ((5, 3, 1), None, r"warmup_forwards: got 3 values, expected 4"),
        ((5, 6, 3, 1), None, r"warmup_forwards\[1\]: got 6, expected 1 to 5"),
        ((13, 5, 3, 1), None, r"warmup_forwards\[0\]: got 13, expected 1 to 12"),
        ((5, 5, 3, 0), None, r"warmup_forwards\[3\]: got 0, expected 1 to 1"),
        ((7, 5, 3, 1), (6, 6, 6, 6), r"warmup_forwards\[0\]: got 7, expected 1 to 6"),
    ],
)
def test_impossible_warm_ups_are_named(warmup, caps, message):
    with pytest.raises(UserError, match=message):
        plan(EQUAL, {}, Limits(caps), 12, warmup_forwards=warmup)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"name": "interlaced"},
            "schedule: got 'interlaced', expected one of gpipe, 1f1b, 1f1b-eager, zb-h1, zb-h2, "
            "interleaved, zb-v, dualpipe-v, paper, adaptive, initial",
        ),
        ({"name": "gpipe", "warmup_forwards": (4, 3, 2, 1)}, "warmup_forwards: gpipe has its own"),
        ({"num_microbatches": 0}, "num_microbatches: got 0"),
        ({"name": "interleaved", "num_chunks": 0}, "num_chunks: got 0, expected at least 1"),
        (
            {"name": "zb-h2", "limits": Limits((7, 4, 4, 4))},
            "max_live[1]: zb-h2 holds 5 microbatches until B on stage 1, expected at most 4",
        ),
    ],
)
def test_what_cannot_be_planned_is_named(changes, message):
    asked = {"limits": Limits(), "num_microbatches": 12}
    with pytest.raises(UserError) as caught:
        plan(EQUAL, {}, **asked | changes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("link_model", ["serialized", "latency"])
def test_adaptive_beats_alternatives_on_queueing_links(link_model):
    fields = {
        "name": "queueing", "num_stages": 5, "num_microbatches": 9,
        "forward_ms": [15, 15, 12, 15, 10], "backward_input_ms": [10, 8, 12, 12, 10],
        "backward_weight_ms": [5, 5, 8, 10, 12], "link_ms": [20, 0, 40, 3],
        "link_model": link_model, "time_step_ms": None if link_model == "serialized" else 7,
    }  # fmt: skip
    makespan_ms = {
        name: solve(parse_problem(fields | {"schedule": name})).timeline.makespan_ms
        for name in ("adaptive", "paper", "initial", "zb-h1", "zb-h2")
    }
    assert makespan_ms["adaptive"] == min(makespan_ms.values())


SIZES = StashBytes((1_000, 2_000, 500), (400, 2_500, 500))


def _message(check, *args) -> str:
    with pytest.raises(UserError) as caught:
        check(*args)
    return str(caught.value)


def test_room_for_one_microbatch_is_feasible():
    require_feasible(Limits(max_stash_bytes=(1_000, 2_500, 500), stash_bytes=SIZES), 3, 8)
    require_feasible(Limits((1, 1, 1), "W"), 3, 8)
    require_feasible(Limits(), 3, 8)


def test_a_cap_below_one_microbatch_is_refused():
    limits = Limits(max_stash_bytes=(1_000, 2_300, 100), stash_bytes=SIZES)
    assert _message(require_feasible, limits, 3, 8) == (
        "max_stash_bytes[1]: got 2,300 bytes, expected at least 2,500, which one microbatch keeps "
        "on stage 1: 200 short; smaller microbatches, recomputing the stash or offloading it would "
        "help"
    )


def test_too_many_bytes_are_refused_with_the_stage():
    limits = Limits(max_stash_bytes=(9_000, 7_000, 9_000), stash_bytes=SIZES)
    assert _message(require_room, gpipe(3, 4), limits) == (
        "max_stash_bytes[1]: gpipe holds 8,000 bytes on stage 1, 1,000 more than 7,000; fewer "
        "microbatches in flight (as paper and adaptive plan them), recomputing the stash or "
        "offloading it would help"
    )
    require_room(gpipe(3, 4), Limits(max_stash_bytes=(4_000, 8_000, 2_000), stash_bytes=SIZES))


@pytest.mark.parametrize(
    ("name", "peak"), [("gpipe", 60), ("1f1b", 20), ("1f1b-eager", 35), ("interleaved", 28)]
)
def test_whole_backwards_need_no_room_for_w(name, peak):
    sizes, chunks = StashBytes((5,) * 4, (40,) * 4), 2 if name == "interleaved" else 1
    free = plan(EQUAL, {}, Limits(), 12, name, num_chunks=chunks)
    limits = Limits(max_stash_bytes=(peak,) * 4, stash_bytes=sizes)
    capped = plan(EQUAL, {}, limits, 12, name, num_chunks=chunks)
    assert capped.schedule == free.schedule
    tighter = Limits(max_stash_bytes=(peak - 1,) * 4, stash_bytes=sizes)
    with pytest.raises(UserError, match=rf"holds {peak} bytes on stage 0, 1 more"):
        plan(EQUAL, {}, tighter, 12, name, num_chunks=chunks)


def test_a_given_whole_backward_needs_no_room_for_w():
    fields = {
        "name": "given", "num_stages": 2, "num_microbatches": 3, "forward_ms": 10,
        "backward_input_ms": 10, "backward_weight_ms": 10, "link_ms": 0, "max_stash_bytes": 10,
        "stash_bytes_after_forward": 5, "stash_bytes_after_backward": 20,
        "orders": [
            ["F0", "F1", "BW0", "F2", "BW1", "BW2"], ["F0", "BW0", "F1", "BW1", "F2", "BW2"]
        ],
    }  # fmt: skip
    answer = solve(parse_problem(fields))
    assert (answer.timeline.makespan_ms, answer.lower_bound_ms) == (120.0, 100.0)
    assert answer.peak_stash_bytes == (10, 5)


def test_too_many_microbatches_are_refused_with_the_stage():
    late = Schedule.from_rows("late", ["F0 B0 F1 B1 W0 W1", "F0 B0 W0 F1 B1 W1"])
    require_room(late, Limits((1, 1), "B"))
    assert _message(require_room, late, Limits((1, 1), "W")) == (
        "max_live[0]: late holds 2 microbatches until W on stage 0, expected at most 1; paper and "
        "adaptive fit any cap"
    )


def test_a_chunk_counts_as_part_of_a_microbatch():
    # Rank 0 holds at most 11 chunks of two: as much as five and a half microbatches.
    schedule, sizes = interleaved(4, 8, 2), StashBytes((100,) * 4, (0,) * 4)
    require_room(schedule, Limits((6,) * 4))
    with pytest.raises(UserError, match=r"max_live\[0\]: interleaved holds 6 .* at most 5"):
        require_room(schedule, Limits((5,) * 4))
    require_room(schedule, Limits(max_stash_bytes=(550,) * 4, stash_bytes=sizes))
    with pytest.raises(UserError, match=r"holds 550 bytes on stage 0, 1 more than 549"):
        require_room(schedule, Limits(max_stash_bytes=(549,) * 4, stash_bytes=sizes))
