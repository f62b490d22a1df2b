from random import Random

from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.schedule.costs import Limits, Link, LinkState, StageCosts
from jaxmorph.schedule.memory import StashBytes
from jaxmorph.schedule.workload import make_workload, to_picoseconds

PS = 10**9
COSTS = StageCosts((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (7.0, 8.0, 9.0))
LINKS = {Link(0, 1): LinkState(0.5, 0.25), Link(1, 2): LinkState(1.5, 0.0, 2.0, 3.0)}


def test_a_workload_counts_picoseconds_of_ops_and_of_the_way_to_each_neighbour():
    made = make_workload(COSTS, LINKS, Limits(), 5)
    assert made.num_stages == 3
    assert made.forward == (1 * PS, 2 * PS, 3 * PS)
    assert made.backward_input == (4 * PS, 5 * PS, 6 * PS)
    assert made.backward_weight == (7 * PS, 8 * PS, 9 * PS)
    assert made.forward_latency == (PS // 2, 7 * PS // 2, 0)  # occupancy and latency of link 1-2
    assert made.backward_latency == (0, PS // 4, 3 * PS)


def test_without_caps_there_is_room_for_every_microbatch():
    made = make_workload(COSTS, {}, Limits(), 5)
    assert (made.forward_holds, made.backward_holds, made.room) == ((1,) * 3, (0,) * 3, (5,) * 3)


def test_caps_until_w_hold_on_to_microbatches_after_b():
    made = make_workload(COSTS, {}, Limits((2, 9, 1), "W"), 5)
    assert (made.forward_holds, made.backward_holds, made.room) == ((1,) * 3, (1,) * 3, (2, 5, 1))


def test_caps_in_bytes_are_taken_as_they_are():
    limits = Limits(max_stash_bytes=(9, 8, 7), stash_bytes=StashBytes((1, 2, 3), (4, 5, 6)))
    made = make_workload(COSTS, {}, limits, 5)
    holds = (made.forward_holds, made.backward_holds, made.room)
    assert holds == ((1, 2, 3), (4, 5, 6), (9, 8, 7))


def test_in_the_mirror_b_goes_down_the_stages_and_f_comes_back_up():
    mirrored = make_workload(COSTS, LINKS, Limits(), 5).mirror()
    assert mirrored.mirrored
    assert mirrored.forward == (4 * PS, 5 * PS, 6 * PS)
    assert mirrored.backward_input == (1 * PS, 2 * PS, 3 * PS)
    # What stage 1 sends to stage 0 when time runs forward, stage 0 sends to stage 1 in the mirror.
    assert mirrored.forward_latency == (PS // 4, 3 * PS, 0)
    assert mirrored.backward_latency == (0, PS // 2, 7 * PS // 2)


@given(st.integers(1, 5), st.integers(0, 2**32).map(Random))
def test_the_mirror_of_the_mirror_is_the_workload(stages, draw):
    times = StageCosts(*(tuple(draw.random() for _ in range(stages)) for _ in range(3)))
    links = {Link(stage, stage + 1): LinkState(draw.random(), 2.0) for stage in range(stages - 1)}
    caps = tuple(draw.randint(1, 4) for _ in range(stages))
    workload = make_workload(times, links, Limits(caps, "W"), 3)
    assert workload.mirror().mirror() == workload


def test_times_that_no_float_holds_exactly_count_as_they_are_written():
    tenths = StageCosts.uniform(1, 0.1, 0.2, 0.1 + 0.2)
    made = make_workload(tenths, {}, Limits(), 1)
    assert made.forward[0] + made.backward_input[0] == made.backward_weight[0] == 3 * PS // 10


def test_a_bound_is_rounded_down_so_that_it_stays_one():
    assert to_picoseconds(1.9999999999) == 2 * PS - 1
    assert to_picoseconds(0.0) == 0
