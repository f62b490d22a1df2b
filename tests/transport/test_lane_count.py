import pytest

from jaxmorph.transport.outgoing_lanes import LaneGain, Production, lanes_needed


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


CHUNK = 16 * 1024
WAITING = 1 << 20


class Lanes:
    """Lanes that take away so much, from a heap that stays as high as it is."""

    def __init__(self):
        self.gain, self.now_s, self.landed_bytes = LaneGain(CHUNK), 5.0, 0

    def may_grow(self, lanes, bytes_per_s, seconds=1.6, piles_up=True, drained=0):
        """What is said after so long."""
        said = self.ask(lanes, WAITING, piles_up)
        for step in range(1, 61):
            self.now_s += seconds / 60
            self.landed_bytes += int(bytes_per_s * seconds / 60)
            said = self.ask(lanes, WAITING - drained * step // 60, piles_up)
        return said

    def ask(self, lanes, waiting, piles_up):
        return self.gain.may_grow(lanes, self.landed_bytes, waiting, piles_up, self.now_s)


def test_another_lane_is_tried_once_it_is_known_what_those_there_are_do():
    lanes = Lanes()
    assert not lanes.may_grow(2, 2e6, seconds=1.2)
    assert lanes.may_grow(2, 2e6, seconds=0.2)


def test_lanes_are_tried_as_long_as_each_brings_more():
    lanes = Lanes()
    assert [lanes.may_grow(count, count * 1e6) for count in range(2, 8)] == [True] * 6


def test_no_more_are_tried_after_one_that_brought_nothing_until_much_later():
    lanes = Lanes()
    assert lanes.may_grow(2, 2e6)
    assert not lanes.may_grow(3, 2e6)
    assert not lanes.may_grow(3, 2e6, seconds=25)
    assert lanes.may_grow(3, 2e6, seconds=10)
    assert not lanes.may_grow(4, 2e6)
    assert not lanes.may_grow(4, 2e6, seconds=35)


def test_where_nothing_lands_at_all_one_more_is_tried_and_no_second():
    lanes = Lanes()
    assert lanes.may_grow(2, 0, seconds=2.5)
    assert not lanes.may_grow(3, 0, seconds=2.5)


def test_after_many_in_vain_another_is_still_tried_every_two_minutes():
    lanes = Lanes()
    lanes.may_grow(2, 2e6)
    for count in range(3, 7):
        assert not lanes.may_grow(count, 2e6)
        assert lanes.may_grow(count, 2e6, seconds=121)


def test_a_lane_is_judged_when_it_has_come_up_to_its_speed_over_a_long_wire():
    lanes, full = Lanes(), 12.5e6
    assert lanes.may_grow(2, 2 * full)
    for round_trips in range(8):  # of 100 ms
        slow_start = min(2**round_trips * 14_600 / 0.1, full)
        assert not lanes.may_grow(3, 2 * full + slow_start, seconds=0.1)
    assert lanes.may_grow(3, 3 * full, seconds=1.0)


def test_what_was_in_vain_is_forgotten_when_a_lane_is_lost():
    lanes = Lanes()
    lanes.may_grow(2, 2e6)
    assert not lanes.may_grow(3, 2e6)
    assert lanes.may_grow(2, 1e6)
    assert lanes.may_grow(3, 2e6)


def test_nothing_is_tried_while_the_heap_goes_down_or_is_none():
    assert not Lanes().may_grow(2, 2e6, drained=WAITING)
    assert not Lanes().may_grow(2, 2e6, piles_up=False)
