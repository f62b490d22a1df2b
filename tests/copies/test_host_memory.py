"""Copies on the host: immediate, in callbacks, via pinned memory; and arguments of programs."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from oracles.fake_gpu import Slot

from jaxmorph.copies import host_memory
from jaxmorph.copies.backends import PayloadShape, SlotUse, is_ready
from jaxmorph.copies.host_memory import (
    ImmediateSend,
    PinnedHostSend,
    for_program,
    host_callback_backends,
    is_on_host,
)
from jaxmorph.copies.trial import try_send

PLACEMENT = SingleDeviceSharding(jax.devices()[0])
TICKET = jnp.zeros(1, jnp.uint32)


class Counting:
    """Counts its copies."""

    name = "counting"

    def __init__(self):
        self.started = 0

    def compile(self, use, placement):
        return self.start

    def start(self, value, part, slot, tag):
        self.started += 1
        return TICKET


class NotReady:
    """An array that is still being computed."""

    def is_ready(self):
        return False


def test_computed_payloads_in_host_memory_are_copied_immediately():
    use = SlotUse(PayloadShape((2, 3), jnp.dtype("float32")), 4)
    copy = ImmediateSend(Counting()).compile(use, PLACEMENT)
    values = jax.block_until_ready(jnp.arange(6, dtype=jnp.float32).reshape(2, 3))
    slots = [Slot(sequence, 16) for sequence in (0, 1)]
    for slot, part in zip(slots, use.parts, strict=True):
        assert is_ready(copy(values, part, slot, (7,)))
    assert [slot.said for slot in slots] == [
        [("post", 16, (7,), np.True_), "complete"],
        [("post", 8, (7,), np.True_), "complete"],
    ]
    arrived = np.concatenate([slot.payload.view(np.float32) for slot in slots])[:6]
    assert arrived.tolist() == [0, 1, 2, 3, 4, 5]


def test_running_computations_are_left_to_the_program():
    use = SlotUse(PayloadShape((2,), jnp.dtype("float32")), 2)
    program = Counting()
    copy = ImmediateSend(program).compile(use, PLACEMENT)
    slot = Slot(0, 8)
    value: Any = NotReady()
    assert copy(value, range(2), slot, (7,)) is TICKET
    assert (program.started, slot.said) == (1, [])


LARGE_COPIES = Path(__file__).with_name("large_copies.py")


@pytest.mark.parametrize("backend", host_callback_backends(), ids=lambda backend: backend.name)
def test_a_message_is_completed_after_its_payload(backend):
    use = SlotUse(PayloadShape((2, 3), jnp.dtype("float32")), 6)
    copy = backend.compile(use, PLACEMENT)
    values = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    slots = [Slot(sequence, 24) for sequence in (0xFFFFFFFF, 0, 1)]
    tickets = [
        copy(jnp.asarray(values + at), range(6), slot, (at, 9)) for at, slot in enumerate(slots)
    ]
    assert [np.asarray(ticket).tolist() for ticket in tickets] == [[0], [1], [2]]
    for at, slot in enumerate(slots):
        assert slot.said == [("post", 24, (at, 9), True), "complete"]
        assert np.array_equal(slot.payload.view(np.float32).reshape(2, 3), values + at)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_large_results_arrive_while_others_are_being_computed():
    """A callback that waited for JAX's thread pool would hang in its only thread."""
    path = f"{LARGE_COPIES.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "NPROC": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(LARGE_COPIES)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3 * len(host_callback_backends())


@pytest.fixture
def backend():
    backend = PinnedHostSend()
    yield backend
    backend.close()


def test_pinned_memory_passes_its_trial(backend):
    try_send(backend, PLACEMENT)


@pytest.mark.parametrize("part_elements", [7, 15])
def test_host_memory_gets_no_more_than_a_part(backend, monkeypatch, part_elements):
    placed, place = [], jax.device_put

    def device_put(value, where):
        placed.append((where.memory_kind, value.size))
        return place(value, where)

    monkeypatch.setattr(host_memory.jax, "device_put", device_put)
    use = SlotUse(PayloadShape((3, 5), jnp.dtype("float32")), part_elements)
    copy = backend.compile(use, PLACEMENT)
    for seed in range(2):
        value = jnp.asarray(np.random.default_rng(seed).normal(size=(3, 5)), jnp.float32)
        slots = [Slot(index, use.slot_bytes) for index in range(len(use.parts))]
        tickets = [
            copy(value, part, slot, (seed,)) for part, slot in zip(use.parts, slots, strict=True)
        ]
        jax.block_until_ready(tickets)
        arrived = np.concatenate([slot.payload.view(np.float32) for slot in slots])[:15]
        assert np.array_equal(arrived, np.asarray(value).reshape(-1))
        sent = [slot.said[0][:3] for slot in slots]
        assert sent == [("post", 4 * len(part), (seed,)) for part in use.parts]
    assert placed == 2 * [("pinned_host", len(part)) for part in use.parts]


def test_a_failed_copy_raises_from_its_ticket(backend):
    use = SlotUse(PayloadShape((3, 5), jnp.dtype("float32")), 15)
    slot = Slot(0, 59)
    ticket = backend.compile(use, PLACEMENT)(jnp.ones((3, 5)), range(15), slot, (0,))
    with pytest.raises(ValueError, match="60 bytes, expected at most 59"):
        jax.block_until_ready(ticket)
    assert is_ready(ticket)
    assert slot.said == []


@dataclass(frozen=True)
class Device:
    """A fake device."""

    platform: str
    number: int = 0


class Placement:
    """A fake sharding."""

    def __init__(self, *devices):
        self.device_set = {*devices}


def placement(*devices) -> Any:
    return Placement(*devices)


ELSEWHERE = [
    placement(Device("gpu")),
    placement(Device("gpu", 0), Device("gpu", 1)),
    placement(Device("cpu", 0), Device("cpu", 1)),  # no program takes an array whole there
]


def read_only(dtype):
    values = np.random.default_rng(0).normal(scale=100, size=(4, 3, 5)).astype(dtype)
    values.setflags(write=False)
    return values


def test_only_a_single_cpu_is_host_memory():
    assert is_on_host(PLACEMENT)
    assert is_on_host(placement(Device("cpu")))
    assert [is_on_host(each) for each in ELSEWHERE] == [False] * len(ELSEWHERE)


@pytest.mark.parametrize("dtype", ["int32", "float32", jnp.bfloat16])
def test_on_a_cpu_programs_take_read_only_values_uncopied(dtype):
    values = read_only(dtype)
    program = jax.jit(lambda x: (x, x * x + 1)).lower(values[1]).compile()  # part of a batch
    given = for_program(values[1], PLACEMENT)
    assert isinstance(given, np.ndarray)
    assert given.base is values
    before = values.tobytes()
    expected = program(jax.device_put(values[1], PLACEMENT))
    for got, due in zip(program(given), expected, strict=True):
        assert (got.dtype, got.sharding) == (due.dtype, due.sharding)
        assert np.asarray(got).tobytes() == np.asarray(due).tobytes()
    assert values.tobytes() == before


@pytest.mark.parametrize("there", ELSEWHERE, ids=["gpu", "two gpus", "two cpus"])
def test_elsewhere_values_are_placed_first(there, monkeypatch):
    placed = []

    def device_put(values, where):
        placed.append((values, where))
        return "placed"

    monkeypatch.setattr(host_memory.jax, "device_put", device_put)
    values = read_only("float32")
    assert for_program(values, there) == "placed"
    ((given, where),) = placed
    assert given is values
    assert where is there
