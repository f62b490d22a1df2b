"""How long what a morph has changed stays so."""

from jaxmorph.control.dwell import Dwell

DWELL = Dwell(least_steps=4, most_steps=20)


def test_what_has_never_changed_may_change():
    assert DWELL.waits(["2-3"], 0) == 0


def test_a_change_stands_for_the_least_number_of_steps():
    changed = DWELL.after(["2-3"], 10)
    assert [changed.waits(["2-3"], step) for step in (10, 13, 14, 50)] == [4, 1, 0, 0]
    assert changed.waits(["0-1"], 10) == 0
    assert changed.waits(["0-1", "2-3"], 11) == 3


def stays(*steps):
    """How long each of several changes of one thing stands."""
    dwell, found = DWELL, []
    for step in steps:
        dwell = dwell.after(["2-3"], step)
        found.append(dwell.waits(["2-3"], step))
    return found


def test_what_keeps_changing_stands_twice_as_long_each_time_up_to_the_most():
    assert stays(0, 16, 48, 60, 90) == [4, 8, 16, 20, 20]


def test_a_while_without_a_change_is_neither_flapping_nor_calm():
    assert stays(0, 17, 49) == [4, 4, 4]


def test_after_a_calm_it_stands_half_as_long_down_to_the_least():
    assert stays(0, 16, 48, 48 + 129, 48 + 129 + 65, 1000, 2000) == [4, 8, 16, 8, 4, 4, 4]


def test_things_flap_each_for_itself():
    dwell = DWELL.after(["2-3"], 0).after(["2-3", "0-1"], 5)
    assert (dwell.waits(["2-3"], 5), dwell.waits(["0-1"], 5)) == (8, 4)


def test_what_changes_for_another_things_sake_stands_as_long_as_at_first_and_flaps_no_more():
    dwell = DWELL.after(["order"], 0)
    for step in (4, 8, 12):
        dwell = dwell.standing(["order"], step)
        assert dwell.waits(["order"], step) == 4
    assert dwell.after(["order"], 17).waits(["order"], 17) == 4  # 17 after the last of its own
    assert dwell.after(["order"], 16).standing(["order"], 17).waits(["order"], 17) == 7
    assert DWELL.standing(["order"], 5).after(["order"], 9).waits(["order"], 9) == 4
