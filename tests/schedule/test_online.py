"""What a rank takes next, told item by item: rows of ops in, rows of ops out."""

import pytest

from jaxmorph.schedule.memory import StageMemory
from jaxmorph.schedule.online import Decision, Leeway, OnlineOrder, Preference
from jaxmorph.schedule.ops import Op, OpKind

ALL, W_ALONE, NONE = frozenset(OpKind), frozenset({OpKind.W}), frozenset()
ROOMY = StageMemory(1, 0, 100)
OP_MS = 10.0
FIRST = Preference.GRADIENTS


def row(text):
    """Ops by their names; `|` is what keeps its place."""
    return [None if name == "|" else Op.parse(name) for name in text.split()]


def online(
    text, *, movable=ALL, memory=ROOMY, gaps=None, tolerance_ms=0.0, prefers="gradients first"
):
    """The order of a rank whose ops follow one another, but for the waits before some of them."""
    items, starts, now_ms = row(text), [], 0.0
    for op in (op for op in items if op is not None):
        now_ms += (gaps or {}).get(str(op), 0.0)
        starts.append(now_ms)
        now_ms += OP_MS
    ends = tuple(start + OP_MS for start in starts)
    return OnlineOrder(
        items, movable, Leeway(tuple(starts), ends, memory, tolerance_ms, Preference(prefers))
    )


def run(order, text, missing, now_ms=1e6):
    """The order in which items are taken, long after their time, while some never come."""
    items, taken = row(text), []
    while True:
        index, _ = order.decide(now_ms, now_ms - 1e5, lambda at: str(items[at]) not in missing)
        if index is None:
            return " ".join("|" if items[at] is None else str(items[at]) for at in taken)
        order.take(index)
        taken.append(index)


def everything(index):
    return True


def test_with_everything_there_the_order_is_the_planned_one_however_late_it_is():
    text = "F0 F1 B0 F2 W0 B1 W1 B2 W2"
    assert run(online(text), text, missing=()) == text


def test_a_plan_that_uses_its_memory_up_is_kept_as_it_is():
    text = "F0 B0 F1 F2 W0 B1 W1 B2 W2"
    memory = StageMemory(2, 3, 7)  # with F2 it is full: its own B finds room once W0 has run
    assert memory.peak([op for op in row(text) if op]) == 7
    assert run(online(text, memory=memory), text, missing=()) == text


def test_in_place_of_what_is_late_comes_a_b_before_an_f_before_a_w():
    text = "F0 F1 B0 B1 F2 W0 F3 B2 W1 W2 B3 W3"
    assert run(online(text), text, {"B1"}) == "F0 F1 B0 F2 F3 W0"
    text = "F0 F1 F2 B0 F3 B1 W0 W1 B2 B3 W2 W3"
    assert run(online(text), text, {"F3"}) == "F0 F1 F2 B0 B1 B2 W0 W1 W2"


def test_once_it_has_left_the_plan_a_gradient_goes_first_even_where_the_plan_has_it_later():
    text = "F0 F1 B0 F2 W0 B1 W1 B2 W2"
    order, items = online(text), row(text)
    for index in range(2):
        order.take(index)
    assert order.decide(500.0, 400.0, lambda at: str(items[at]) != "B0").item == 3  # F2
    order.take(3)
    taken = []
    while (index := order.decide(600.0, 600.0, everything).item) is not None:
        order.take(index)
        taken.append(str(items[index]))
    assert taken == ["B0", "B1", "B2", "W0", "W1", "W2"]


def test_where_it_may_not_leave_the_plan_what_is_late_is_stood_in_for_in_the_plans_order():
    text = "F0 F1 B0 W0 F2 B1 W1 B2 W2"
    order = online(text, prefers=Preference.PLAN)
    assert run(order, text, {"B1", "F2"}) == "F0 F1 B0 W0"
    assert run(order, text, {"B1"}) == "F2"
    assert not order.has_left_plan
    text = "F0 F1 B0 W0 F2 F3 B1 W1 B2 W2 B3 W3"
    assert run(online(text, prefers=Preference.PLAN), text, {"B0"}) == "F0 F1 F2 F3"
    order = online(text, prefers=Preference.PLAN)
    assert run(order, text, {"F2"}) == "F0 F1 B0 W0 B1 W1"
    assert run(order, text, ()) == "F2 F3 B2 W2 B3 W3"


def test_with_weight_gradients_last_f_and_b_keep_the_order_of_the_plan():
    text = "F0 F1 B0 W0 F2 B1 F3 W1 B2 W2 B3 W3"
    order = online(text, prefers=Preference.WEIGHTS_LAST)
    assert run(order, text, {"B1"}) == "F0 F1 B0 W0 F2 F3"
    assert order.has_left_plan
    assert run(order, text, ()) == "B1 B2 B3 W1 W2 W3"
    order = online(text, prefers=Preference.WEIGHTS_LAST)
    assert run(order, text, {"F2"}) == "F0 F1 B0 W0 B1 W1"
    assert run(order, text, ()) == "F2 F3 B2 B3 W2 W3"


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (StageMemory(1, 0, 8), Preference.GRADIENTS),
        (StageMemory(2, 3, 24), Preference.GRADIENTS),
        (StageMemory(1, 0, 7), Preference.WEIGHTS_LAST),
        (StageMemory(1, 1, 7), Preference.PLAN),
        (StageMemory(2, 3, 23), Preference.PLAN),
    ],
)
def test_memory_decides_what_is_preferred(memory, expected):
    assert Preference.within(memory, 8) is expected


def test_nothing_is_decided_while_the_rank_has_work_left():
    order = online("F0 B0 W0")
    order.take(0)
    assert order.decide(5.0, 30.0, lambda at: at == 2) == Decision(None, 30.0)
    assert not order.has_left_plan


def test_what_the_plan_lets_a_rank_wait_for_is_not_late():
    order = online("F0 F1 B0 W0 B1 W1", gaps={"B0": 15.0}, tolerance_ms=2.0)
    order.take(0)
    assert order.decide(11.0, 10.0, lambda at: at == 5) == Decision(None, 12.0)
    order.take(1)
    # It had run by 26 ms instead of 20: the wait of 15 ms begins then.
    assert order.decide(27.0, 26.0, lambda at: False) == Decision(None, 43.0)
    assert order.decide(42.9, 26.0, lambda at: False) == Decision(None, 43.0)
    assert order.decide(43.0, 26.0, lambda at: False).item is None
    assert order.has_left_plan


def test_a_wait_that_the_plan_has_is_waited_once_and_not_again_after_a_weight_gradient():
    order = online("F0 F1 B0 W0 B1 W1", movable=W_ALONE, gaps={"B1": 15.0}, tolerance_ms=2.0)
    for index in range(3):
        order.take(index)
    order.take(3)
    # By the plan B1 starts at 55 ms; it never comes, and W1 needs it. Nothing else can run.
    assert order.decide(45.0, 40.0, lambda at: False) == Decision(None, 57.0)
    order = online("F0 B0 F1 B1 F2 W0 W1 B2 W2", movable=W_ALONE, gaps={"F2": 15.0})
    for index in range(4):
        order.take(index)
    late = {4}  # F2, which starts at 55 ms by the plan
    assert order.decide(54.0, 40.0, lambda at: at not in late) == Decision(None, 55.0)
    assert order.decide(55.0, 40.0, lambda at: at not in late).item == 5  # W0
    order.take(5)
    assert order.is_choosing
    assert order.decide(60.0, 65.0, lambda at: at not in late) == Decision(None, 65.0)
    assert order.decide(65.0, 65.0, lambda at: at not in late).item == 6  # W1, at once
    order.take(6)
    assert order.decide(70.0, 75.0, everything).item == 4  # F2, as soon as it is there
    order.take(4)
    assert not order.is_choosing


def test_a_wait_that_the_plan_has_for_a_direct_transfer_is_not_waited_again_after_it():
    order = online("F0 | B0 W0", movable=W_ALONE, gaps={"B0": 35.0}, tolerance_ms=2.0)
    order.take(0)
    order.ran(Op.parse("F0"), 0.0, 10.0)
    order.take(1)  # over at 40 ms; B0's message, due at 45, comes late
    assert order.decide(41.0, 40.0, lambda at: False) == Decision(None, 47.0)


def test_what_ops_take_longer_makes_no_message_late():
    order = online("F0 F1 B0 W0 B1 W1", gaps={"F1": 10.0, "B0": 15.0}, tolerance_ms=2.0)
    order.take(0)
    order.ran(Op.parse("F0"), 0.0, 18.0)  # 8 ms longer
    order.take(1)
    order.ran(Op.parse("F1"), 20.0, 30.0)  # in time: the plan has a wait before it
    # B0, which starts at 45 ms by the plan, is made from what F0 made.
    assert order.decide(47.0, 30.0, lambda at: False) == Decision(None, 55.0)
    order.take(2)
    order.ran(Op.parse("B0"), 90.0, 100.0)  # that it came late is no matter of ops
    assert order.decide(101.0, 100.0, lambda at: at != 3) == Decision(None, 102.0)


def test_a_rank_that_may_move_w_alone_keeps_all_else_in_order_and_stays_with_the_plan():
    text = "F0 F1 | B0 F2 W0 B1 | W1 B2 W2"
    assert run(online(text, movable=W_ALONE), text, {"B1"}) == "F0 F1 | B0 F2 W0"
    assert run(online(text, movable=W_ALONE), text, {"F2"}) == "F0 F1 | B0 W0"
    order = online(text, movable=W_ALONE)
    assert run(order, text, {"F2"}) == "F0 F1 | B0 W0"
    assert run(order, text, ()) == "F2 B1 | W1 B2 W2"


def test_a_rank_that_may_move_nothing_waits():
    text = "F0 B0 F1 W0 B1 W1"
    order = online(text, movable=NONE)
    assert run(order, text, {"F1"}) == "F0 B0"
    assert order.decide(1e6, 10.0, lambda at: False) == Decision(None)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (StageMemory(1, 0, 2), "F0 F1"),  # counted until B: F2 would be a third
        (StageMemory(1, 0, 3), "F0 F1 F2"),
        (StageMemory(2, 3, 7), "F0 F1 F2"),  # in bytes: F3's own B would need 9
        (StageMemory(2, 3, 6), "F0 F1"),
    ],
)
def test_no_op_is_taken_for_which_there_is_no_memory(memory, expected):
    text = "F0 F1 B0 W0 F2 B1 W1 F3 B2 W2 B3 W3"
    assert run(online(text, memory=memory), text, {"B0"}) == expected


def test_a_place_that_is_held_until_w_is_free_after_it():
    text = "F0 F1 B0 W0 F2 B1 W1 B2 W2"
    order = online(text, memory=StageMemory(1, 1, 2))
    assert run(order, text, {"B1", "F2"}) == "F0 F1 B0 W0"
    assert run(order, text, {"B1"}) == "F2"
    assert run(order, text, {"B2"}) == "B1 W1"


def test_full_backwards_come_before_forwards_too():
    text = "F0 F1 BW0 F2 BW1 F3 BW2 BW3"
    assert run(online(text), text, {"BW0"}) == "F0 F1 F2 F3"
    assert run(online(text), text, {"F2"}) == "F0 F1 BW0 BW1"
