import os
import time

import pytest

from jaxmorph.transport.event_loop import READ, EventLoop

LONG_S = 30.0


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


@pytest.mark.parametrize("exact_in_s", [0.0, 0.5e-3, 1.5e-3, 20e-3, LONG_S])
def test_a_ready_descriptor_ends_waiting(pipe, exact_in_s):
    loop, masks = EventLoop(), []
    loop.add(pipe[0], READ, masks.append)
    os.write(pipe[1], b"x")
    now_s = time.monotonic()
    loop.turn(now_s + LONG_S, now_s + exact_in_s)
    assert masks == [READ]


@pytest.mark.parametrize("in_s", [0.5e-3, 1.5e-3, 5e-3])
@pytest.mark.parametrize("is_exact", [True, False])
def test_waiting_ends_at_its_time(in_s, is_exact):
    loop, began_s = EventLoop(), time.monotonic()
    at_s, never_s = began_s + in_s, began_s + LONG_S
    while time.monotonic() < at_s:
        loop.turn(*((never_s, at_s) if is_exact else (at_s,)))
    assert time.monotonic() - began_s < LONG_S / 2


def test_a_past_time_is_not_waited_for():
    loop, now_s = EventLoop(), time.monotonic()
    loop.turn(0.0)
    loop.turn(now_s + LONG_S, now_s - 1)
    assert time.monotonic() - now_s < LONG_S / 2
