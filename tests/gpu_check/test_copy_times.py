"""Statistics of copies' times and of what computation loses beside them."""

from contextlib import contextmanager
from dataclasses import replace

import jax
import pytest
from wrong_tiers import PLACEMENT

from jaxmorph.gpu_check.copy_settings import COPIES_ON_CPU, COPIES_ON_GPU
from jaxmorph.gpu_check.copy_times import speed_of, time_behind_s
from jaxmorph.gpu_check.disturbance import measure_disturbance, ops_between, slowdowns

GPU, CPU = COPIES_ON_GPU.matmuls, COPIES_ON_CPU.matmuls


def test_speed_is_by_medians():
    times = {"alone_s": [0.05, 0.01, 3.0], "behind_s": [0.08, 0.04, 9.0]}
    speed = speed_of(10**9, 2, **times, bare_s=[0.04, 0.04, 0.001])
    assert (speed.time_ms, speed.gb_per_s, speed.bare_gb_per_s) == (50.0, 25.0, 50.0)
    assert speed.share == 0.5
    assert speed_of(8, 2, [1.0], [1.0], []).share is None


def test_computation_that_slows_down_by_itself_is_not_slowed_by_messages():
    warming = [[1.0 + round_ / 10 + at / 40 for at in range(4)] for round_ in range(3)]
    training, flat_out = slowdowns(warming, last_alone_s=1.3)
    assert training == pytest.approx(0.0)
    assert flat_out == pytest.approx(0.0)


def test_slowdown_is_against_the_times_alone_around_it_and_by_medians():
    rounds = [[1.0, 1.1, 1.0, 1.5], [1.0, 1.1, 1.0, 1.5], [1.0, 9.0, 1.0, 0.5]]
    training, flat_out = slowdowns(rounds, last_alone_s=1.0)
    assert training == pytest.approx(0.1)
    assert flat_out == pytest.approx(0.5)


@pytest.mark.parametrize(("op_ms", "ops"), [(1.7, 6), (10.0, 1), (40.0, 1), (0.001, GPU.ops)])
def test_messages_come_as_often_as_asked_and_at_least_once(op_ms, ops):
    assert ops_between(op_ms / 1e3, GPU) == ops


class Counted:
    """Traffic that notes what it was given; it has room for one message at a time."""

    def __init__(self):
        self.begun, self.drained, self._has_room = [], 0, True

    def begin(self, payload):
        if self._has_room:
            self.begun.append(payload)
        self._has_room = not self._has_room
        return not self._has_room

    def drain(self):
        self.drained += 1


class Full(Counted):
    """Traffic that never has room."""

    def begin(self, payload):
        return False


def test_messages_one_behind_another_are_begun_as_soon_as_there_is_room_and_are_over():
    traffic, payload = Counted(), jax.numpy.zeros(2)
    assert time_behind_s(traffic, payload, count=3, patience_s=10.0) > 0
    assert (len(traffic.begun), traffic.drained) == (3, 1)
    assert all(begun is payload for begun in traffic.begun)
    with pytest.raises(TimeoutError, match=r"no room for message 0 within 0\.01 s"):
        time_behind_s(Full(), payload, count=3, patience_s=0.01)


def test_messages_of_both_kinds_go_along_and_are_over_before_the_next_timing():
    traffic = Counted()

    @contextmanager
    def opened(payload):
        assert payload.shape == (settings.message_bytes // 2,)
        yield traffic

    settings = replace(CPU, every_s=0.0)  # a message after every op
    found = measure_disturbance(opened, PLACEMENT, settings)
    assert traffic.drained == 2 * (settings.rounds + 1)
    assert found.num_training == settings.ops / 2
    assert found.flat_out_gb_per_s > 0
    assert {value.nbytes for value in traffic.begun} == {settings.message_bytes}
