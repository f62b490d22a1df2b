import pytest

from jaxmorph.transport.lane_count import Production, lanes_needed


@pytest.mark.parametrize(
    ("production", "drain", "expected"),
    [(8, 2, 4), (8.1, 2, 5), (0, 2, 1), (1, 2, 1), (900, 1, 64)],
)
def test_lanes_drain_what_is_produced(production, drain, expected):
    assert lanes_needed(production, drain) == expected


def test_limits_hold():
    assert lanes_needed(1, 1, fewest=2) == 2
    assert lanes_needed(100, 1, most=4) == 4


@pytest.mark.parametrize(("production", "drain"), [(1, 0), (-1, 1), (1, float("nan"))])
def test_rates_that_cannot_be_are_refused(production, drain):
    with pytest.raises(ValueError, match="expected"):
        lanes_needed(production, drain)


def test_production_is_that_of_the_last_second():
    production = Production()
    for tenth in range(30):
        production.posted(10 if tenth < 20 else 100, 5 + tenth / 10)
    assert production.per_s(7.95) == 1000
    assert production.per_s(9.0) == 0
