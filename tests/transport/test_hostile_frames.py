"""Hostile frames near the valid ones, checked down to the slots' memory."""

import itertools
import tracemalloc
from collections import Counter

import pytest
from hostile_frames import Shape
from hostile_peer import Agent, HostilePeer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jaxmorph.transport import lanes, nixl_lanes
from jaxmorph.transport.link import NIXL, TCP
from jaxmorph.transport.wire import MAX_CHUNK_BYTES

FRAMES_AN_ATTACK = 500
ATTACKS = settings().max_examples  # 25 or 300, as the profile says
TRACED = 16  # one attack in so many
MOST_BYTES = 2 << 20


def shapes(backend):
    return st.builds(
        Shape,
        backend=st.just(backend),
        num_slots=st.sampled_from((1, 2, 4)),
        slot_bytes=st.sampled_from((1, 1023, 1024, 1025, 2500, 4096)),
        first=st.sampled_from((0, 2**31 - 5, 2**32 - 5, 2**32 - 1)),
        num_lanes=st.integers(1, 3),
        seed=st.integers(0, 2**32 - 1),
    )


def attack(shape):
    peer = HostilePeer(shape)
    try:
        peer.attack(FRAMES_AN_ATTACK)
    finally:
        peer.close()
    return peer.counts


def traced_attack(shape):
    """An attack with traced allocations, several times as slow."""
    tracemalloc.start()
    try:
        counts = attack(shape)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MAX_CHUNK_BYTES + MOST_BYTES
    return counts


@pytest.mark.parametrize("backend", [TCP, NIXL])
def test_hostile_frames_write_only_where_they_may(monkeypatch, backend):
    """A member sends frames with their payloads on a lane, after its handshake.

    After each piece all shared memory is compared with what it was before: only the place of an
    allowed chunk may differ, and the descriptions of whole messages. The frames crash nothing and
    take no memory.
    """
    monkeypatch.setattr(nixl_lanes, "NixlAgent", Agent)
    counts: Counter[str] = Counter()
    num_frames, numbers = ATTACKS * FRAMES_AN_ATTACK, itertools.count()

    # A failure is a shape and a seed: shrinking it isn't worth the time.
    @settings(phases=(Phase.generate,), suppress_health_check=[HealthCheck.too_slow])
    @given(shapes(backend))
    def withstand(shape):
        counts.update((attack if next(numbers) % TRACED else traced_attack)(shape))

    withstand()
    assert counts["frames"] >= num_frames
    # The buffer for junk is at most as long as the longest chunk that a frame allows.
    assert len(lanes._shared_junk) <= MAX_CHUNK_BYTES
    # Neither all nor nothing gets far: every path through the receiver is taken often.
    for path, share in {
        "received": 0.1,
        "delivered": 0.05,
        "violations": 0.1,
        "duplicates": 0.01,
        "wrong_checksums": 0.002,
        "aside": 0.001,
        "fenced": 0.001,
    }.items():
        assert share * num_frames < counts[path] < num_frames, path
