import json

import pytest

from jaxmorph.control.answer import answer_lines, solve
from jaxmorph.errors import UserError
from jaxmorph.records import Link
from jaxmorph.schedule.costs import LinkDelay
from jaxmorph.schedule.problem import parse_problem

BYTES = {
    "max_stash_bytes": 500, "stash_bytes_after_forward": 100, "stash_bytes_after_backward": 50,
}  # fmt: skip


def _costs(ms):
    return dict.fromkeys(("forward_ms", "backward_input_ms", "backward_weight_ms"), ms)


def _fields(**changes):
    fields = {"name": "figure 4", "num_stages": 4, "num_microbatches": 12, "link_ms": [0, 0, 0]}
    return fields | _costs([10] * 4) | changes


def _answer(**changes):
    return solve(parse_problem(_fields(**changes))).to_json()


def test_an_answer_has_the_fields_of_the_contract():
    answer = _answer()
    assert list(answer) == [
        "name", "schedule", "makespan_ms", "lower_bound_ms", "bubble_rate", "warmup_forwards",
        "peak_live", "planning_ms", "orders",
    ]  # fmt: skip
    assert answer["name"] == "figure 4"
    assert answer["schedule"] == "adaptive"
    assert answer["makespan_ms"] == answer["lower_bound_ms"] == 390.0
    assert answer["bubble_rate"] == pytest.approx(1 - 360 / 390)
    assert answer["warmup_forwards"] == answer["peak_live"] == [7, 5, 3, 1]
    assert answer["planning_ms"] > 0
    assert answer["orders"][3][:4] == ["F0", "B0", "F1", "B1"]


def test_optional_fields_may_be_null():
    fields = ("max_live", "live_until", "schedule", "planned_link_ms", "warmup_forwards", "orders")
    assert _answer(**dict.fromkeys(fields))["makespan_ms"] == 390.0


def test_planned_links_may_differ_from_simulated_ones():
    assert _answer(link_ms=[20, 0, 0], planned_link_ms=[0, 0, 0])["makespan_ms"] == 440.0
    assert _answer(link_ms=[20, 0, 0])["makespan_ms"] == 410.0


def test_given_orders_are_what_is_simulated():
    orders = _answer()["orders"]
    answer = _answer(orders=orders, link_ms=[10, 0, 0])
    assert answer["orders"] == orders
    assert answer["makespan_ms"] == 400.0
    assert answer["schedule"] == "given"


def test_rounding_leaves_no_gap_to_the_bound():
    one = {"num_stages": 1, "link_ms": [], "schedule": "interleaved", "chunks": 3}
    answer = solve(parse_problem(_fields(**one, **_costs(10))))
    assert answer.timeline.makespan_ms == pytest.approx(answer.lower_bound_ms, rel=1e-12)
    assert answer.gap == 0


def test_each_direction_may_have_its_own_latency():
    slow_up, slow_down = {"link_forward_ms": [0, 0, 20]}, {"link_backward_ms": [0, 0, 20]}
    links = parse_problem(_fields(**slow_up)).links
    assert links[Link(2, 3)] == LinkDelay(forward_latency_ms=20)
    links = parse_problem(_fields(link_ms=5, **slow_down)).links
    assert links[Link(0, 1)] == LinkDelay(5, 0)
    assert links[Link(2, 3)] == LinkDelay(5, 20)


def test_messages_may_occupy_their_link():
    orders = [["F0", "F1", "F2", "BW0", "BW1", "BW2"]] * 2
    two = {"num_stages": 2, "num_microbatches": 3, "orders": orders, "link_ms": 0}
    costs = {"forward_ms": 1, "backward_input_ms": 0, "backward_weight_ms": 0}
    # Sent at 1, 2 and 3, they arrive at 5, 9 and 13; the gradients, at 14, at 18, 22 and 26.
    assert _answer(**two, **costs, link_occupancy_ms=4)["makespan_ms"] == 26.0
    assert _answer(**two | {"link_ms": 4}, **costs)["makespan_ms"] == 12.0
    serialized = _answer(**two | {"link_ms": 4}, **costs, link_model="serialized")
    assert serialized["makespan_ms"] == 26.0


def test_a_time_step_rounds_times_up():
    assert _answer(schedule="zb-h2", time_step_ms=4)["makespan_ms"] == 39 * 12.0
    assert _answer(schedule="zb-h2", time_step_ms=5)["makespan_ms"] == 390.0


def test_interleaved_has_two_chunks_and_a_link_around():
    problem = parse_problem(_fields(schedule="interleaved", link_ms=[1, 2, 3, 4]))
    assert problem.num_chunks == 2
    assert problem.links[Link(0, 3)] == LinkDelay(4, 4)
    without = parse_problem(_fields(schedule="interleaved", link_ms=[1, 2, 3]))
    assert without.links[Link(2, 3)] == LinkDelay(3, 3)
    assert without.links[Link(0, 3)] == LinkDelay(0, 0)
    two = _fields(num_stages=2, schedule="interleaved", link_ms=[1], chunks=3, **_costs(1))
    assert list(parse_problem(two).links) == [Link(0, 1)]


def test_zb_v_has_two_chunks_and_no_link_around():
    problem = parse_problem(_fields(schedule="zb-v", link_ms=[1, 2, 3]))
    assert (problem.num_chunks, list(problem.links)) == (2, [Link(0, 1), Link(1, 2), Link(2, 3)])
    assert solve(problem).to_json()["placement"] == "v"
    with pytest.raises(UserError, match="chunks: got 3, expected 2 for zb-v"):
        parse_problem(_fields(schedule="zb-v", chunks=3))


def test_given_orders_say_how_many_chunks_there_are():
    rows = [["F0", "1.F0", "1.BW0", "BW0"]] * 4
    fields = _fields(num_microbatches=1, orders=rows, link_ms=[0, 0, 0, 5])
    assert parse_problem(fields).num_chunks == 2
    assert solve(parse_problem(fields)).to_json()["makespan_ms"] == 4 * 30.0 + 2 * 5.0
    with pytest.raises(UserError, match="chunks: got 3, but orders have 2"):
        parse_problem(fields | {"chunks": 3})


def test_jitter_adds_a_margin_to_planned_links():
    problem = parse_problem(_fields(link_ms=[0, 0, 20], link_jitter_ms=[0, 0, 10]))
    assert problem.links[Link(2, 3)] == LinkDelay(20, 20)
    assert problem.planned_links[Link(2, 3)] == LinkDelay(27, 27)
    assert problem.planned_links[Link(0, 1)] == LinkDelay(0, 0)
    believed = parse_problem(_fields(link_jitter_ms=10, planned_link_ms=5))
    assert believed.planned_links[Link(0, 1)] == LinkDelay(5, 5)


def test_jitter_adds_expected_makespans_to_the_answer():
    plain = _answer(link_ms=[0, 0, 20])
    assert "expected_makespan_ms" not in plain
    still = _answer(link_ms=[0, 0, 20], link_jitter_ms=0)
    assert list(still) == [*plain, "expected_makespan_ms", "p90_makespan_ms"]
    assert still["expected_makespan_ms"] == still["p90_makespan_ms"] == plain["makespan_ms"]
    jittered = _answer(link_ms=[0, 0, 20], link_jitter_ms=[0, 0, 15])
    assert jittered["makespan_ms"] < jittered["expected_makespan_ms"] < jittered["p90_makespan_ms"]
    again = _answer(link_ms=[0, 0, 20], link_jitter_ms=[0, 0, 15])
    assert again["expected_makespan_ms"] == jittered["expected_makespan_ms"]


def test_caps_on_bytes_are_kept_and_reported():
    answer = _answer(**BYTES)
    assert max(answer["peak_stash_bytes"]) <= 500
    orders = [["F0", "F1", "B0", "W0", "B1", "W1"]]
    one = _fields(num_stages=1, num_microbatches=2, link_ms=[], orders=orders, **_costs(1))
    sizes = {"stash_bytes_after_forward": 100, "stash_bytes_after_backward": 130}
    assert solve(parse_problem(one | sizes)).to_json()["peak_stash_bytes"] == [230]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_stages": 0}, "num_stages: got 0, expected a whole number, at least 1"),
        ({"num_stages": True}, "num_stages: got True, expected a whole number, at least 1"),
        ({"num_microbatches": 2.5}, "num_microbatches: got 2.5, expected a whole number"),
        ({"num_microbatches": 10**9}, "num_microbatches: got 1000000000 for 4 stages, expected at"),
        ({"forward_ms": [1, 2]}, "forward_ms: got 2 values, expected 4 (one per stage)"),
        ({"link_ms": [1] * 4}, "link_ms: got 4 values, expected 3 (one per link)"),
        ({"forward_ms": [1, 2, float("nan"), 4]}, "forward_ms[2]: got nan, expected a number"),
        ({"forward_ms": [1, 2, 10**400, 4]}, "forward_ms[2]: got 100000"),
        ({"backward_input_ms": [1, -2, 3, 4]}, "backward_input_ms[1]: got -2, expected"),
        ({"backward_weight_ms": [1, "2", 3, 4]}, "backward_weight_ms[1]: got '2', expected"),
        ({"backward_weight_ms": [1, False, 3, 4]}, "backward_weight_ms[1]: got False, expected"),
        ({"backward_weight_ms": {}}, "backward_weight_ms: got {}, expected one number or a list"),
        ({"schedule": "magic"}, "schedule: got 'magic', expected one of gpipe"),
        ({"weight_group": 0}, "weight_group: got 0, expected a whole number, at least 1"),
        ({"weight_group": False}, "weight_group: got False, expected a whole number, at least 1"),
        ({"live_until": "F"}, "live_until: got 'F', expected 'B' or 'W'"),
        ({"max_live": [1, 1, 0, 1]}, "max_live[2]: got 0, expected a whole number, at least 1"),
        ({"orders": [["F0", "X1"], [], [], []]}, "orders[0]: got 'X1', expected an op such as F3"),
        ({"orders": ["F0 B0", [], [], []]}, "orders[0]: got 'F0 B0', expected a list of ops"),
        ({"orders": 3}, "orders[0]: got 3, expected a list of ops"),
        ({"orders": [[], [], [], []]}, "orders: stage 0: F0 is missing"),
        ({"name": None}, "name: got None, expected text"),
        ({"link_jitter_ms": [1, 2]}, "link_jitter_ms: got 2 values, expected 3 (one per pair"),
        ({"link_jitter_ms": 1, "link_model": "serialized"}, "link_jitter_ms: got link_model 'se"),
        ({"link_model": "x"}, "link_model: got 'x', expected 'latency', 'serialized' or 'block"),
        ({"time_step_ms": 0}, "time_step_ms: got 0, expected a number of ms above 0"),
        ({"time_step_ms": 1e-310}, "time_step_ms: got 1e-310, expected a number of ms above 0"),
        ({"schedule": "interleaved", "chunks": 10**9}, "chunks: got 1000000000, expected at most"),
        ({"orders": [["1000000000.F0"]] * 4}, "orders: got chunk 1000000000 in a schedule of 4"),
        ({"time_step_ms": 1, "link_model": "blocking"}, "time_step_ms: blocking links are simul"),
        ({"max_stash_bytes": 9}, "stash_bytes_after_forward: missing, expected bytes, since max"),
        ({"stash_bytes_after_forward": 9}, "stash_bytes_after_backward: missing, expected bytes"),
        ({"stash_bytes_after_backward": 9}, "stash_bytes_after_forward: missing, expected bytes"),
        (BYTES | {"max_live": 4}, "max_stash_bytes: got max_live as well, expected only one"),
        ({"max_lve": [3] * 4}, "'max_lve': unknown field, did you mean max_live?"),
        ({"forward_ms": "x" * 500}, f"forward_ms: got '{'x' * 56}..., expected"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named_with_got_and_expected(changes, message):
    with pytest.raises(UserError) as caught:
        _answer(**changes)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["name", "num_stages", "forward_ms", "link_ms"])
def test_a_missing_field_is_named(field):
    fields = _fields()
    del fields[field]
    with pytest.raises(UserError, match=f"{field}: missing"):
        parse_problem(fields)


def test_orders_that_break_a_cap_are_named():
    with pytest.raises(UserError, match=r"max_live\[0\]: given holds 7 microbatches until B"):
        _answer(orders=_answer()["orders"], max_live=[6, 6, 6, 6])


def test_a_batch_answers_every_line_in_order():
    deadlock = [["F0", "B0", "F1", "B1", "W0", "W1"], ["F0", "F1", "B0", "B1", "W0", "W1"]]
    stuck = _fields(name="stuck", num_stages=2, num_microbatches=2, link_ms=[0], orders=deadlock)
    stuck |= _costs(10)
    lines = [
        json.dumps(_fields(name="first")).encode(),
        b"{not json",
        b"",
        b"[1, 2]",
        b"\xff\xfe\xfa",
        b"[" * 100_000,
        b'{"name": NaN}',
        b"1" * 5000,
        json.dumps(_fields(name="negative", link_ms=[0, -1, 0])).encode(),
        json.dumps(stuck).encode(),
        json.dumps(_fields(name="last")).encode(),
    ]
    answers = list(answer_lines(lines))
    assert [answer["name"] for answer in answers] == [
        "first", None, None, None, None, None, None, "negative", "stuck", "last",
    ]  # fmt: skip
    assert answers[0]["makespan_ms"] == answers[-1]["makespan_ms"] == 390.0
    for bad in answers[1:-1]:
        assert list(bad) == ["name", "error"]
        assert "\n" not in bad["error"]
    assert answers[1]["error"].startswith("not JSON: ")
    assert answers[-2]["error"] == (
        "orders: the stages wait for each other in a circle: stage 0 at B0, stage 1 at F1"
    )
