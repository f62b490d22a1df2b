"""What programs are given of the host's arrays: as they are on a CPU, placed anywhere else."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxmorph.copies import host_memory
from jaxmorph.copies.host_memory import for_program, is_on_host

ON_CPU = SingleDeviceSharding(jax.devices()[0])


@dataclass(frozen=True)
class Device:
    """Stands for a device of some kind."""

    platform: str
    number: int = 0


class Placement:
    """Stands for a sharding over some devices."""

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


def test_one_cpu_is_the_hosts_memory():
    assert is_on_host(ON_CPU)
    assert is_on_host(placement(Device("cpu")))
    assert [is_on_host(each) for each in ELSEWHERE] == [False] * len(ELSEWHERE)


@pytest.mark.parametrize("dtype", ["int32", "float32", jnp.bfloat16])
def test_on_a_cpu_a_program_takes_over_what_nobody_may_write_to_as_it_is(dtype):
    values = read_only(dtype)
    program = jax.jit(lambda x: (x, x * x + 1)).lower(values[1]).compile()  # part of a batch
    given = for_program(values[1], ON_CPU)
    assert isinstance(given, np.ndarray)
    assert given.base is values
    before = values.tobytes()
    expected = program(jax.device_put(values[1], ON_CPU))
    for got, due in zip(program(given), expected, strict=True):
        assert (got.dtype, got.sharding) == (due.dtype, due.sharding)
        assert np.asarray(got).tobytes() == np.asarray(due).tobytes()
    assert values.tobytes() == before


@pytest.mark.parametrize("there", ELSEWHERE, ids=["gpu", "two gpus", "two cpus"])
def test_elsewhere_values_are_placed_before_a_program_is_given_them(there, monkeypatch):
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
