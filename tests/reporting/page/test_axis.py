import pytest

from jaxmorph.reporting.page.axis import exact_axis, round_axis


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.0, 431.0, ["0", "100", "200", "300", "400", "500"]),
        (0.0, 0.0031, ["0.000", "0.001", "0.002", "0.003", "0.004"]),
        (4.19, 5.39, ["4.0", "4.5", "5.0", "5.5"]),
        (0.0, 0.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.0, 2_400.0, ["0", "500", "1,000", "1,500", "2,000", "2,500"]),
    ],
)
def test_a_round_axis_ends_at_round_ticks(low, high, texts):
    axis = round_axis(low, high)
    assert [axis.text(tick) for tick in axis.ticks] == texts
    assert axis.low <= low
    assert axis.high >= high


def test_an_exact_axis_ends_where_it_is_told_with_ticks_between():
    axis = exact_axis(0.0, 451.3)
    assert (axis.low, axis.high) == (0.0, 451.3)
    assert axis.ticks == (0.0, 100.0, 200.0, 300.0, 400.0)


def test_few_steps_have_no_ticks_between_them():
    assert exact_axis(7, 9, least_step=1.0).ticks == (7.0, 8.0, 9.0)


def test_places_are_shares_of_the_axis_and_stay_on_it():
    axis = exact_axis(10.0, 20.0)
    assert [axis.at(value) for value in (5.0, 10.0, 12.5, 30.0)] == [0.0, 0.0, 0.25, 1.0]
