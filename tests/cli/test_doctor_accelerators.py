"""Facts about devices and copies: on a CPU, and with a double of a GPU driver."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxmorph.cli.doctor_accelerators import attention_fact, copy_facts, device_facts, driver_fact
from jaxmorph.copies.choosing import CopyBackends, UnavailableBackend
from jaxmorph.copies.cuda_driver import CudaError
from jaxmorph.copies.host_memory import HostReceive, PinnedHostSend


def no_driver(number):
    raise CudaError("loading libcuda.so.1", None, "no such file")


class Driver:
    """A double of a driver that works."""

    is_closed = False

    def version(self):
        return "13.0"

    def close(self):
        self.is_closed = True


def by_name(facts):
    return {fact.name: fact for fact in facts}


@pytest.mark.parametrize(
    ("raised", "works", "note"),
    [
        (None, True, "used here in bfloat16"),
        (RuntimeError("cuDNN is not\ndetected."), False, "RuntimeError: cuDNN is not detected."),
    ],
)
def test_on_a_gpu_attention_by_cudnn_is_tried(monkeypatch, raised, works, note):
    gpu = SimpleNamespace(platform="gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])

    def compile_(device):
        assert device is gpu
        if raised:
            raise raised

    fact = attention_fact(compile_)
    assert (fact.works, fact.note) == (works, note)


def test_a_gpu_has_its_compute_capability(monkeypatch):
    gpu = SimpleNamespace(
        id=0,
        device_kind="NVIDIA H800",
        compute_capability="9.0",
        memory_stats=lambda: {"bytes_limit": 60 << 30},
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    found = by_name(device_facts())["device 0"].found
    assert found == "NVIDIA H800, compute capability 9.0, 60.0 GiB for JAX"


def test_a_driver_has_its_version_and_is_closed():
    driver: Any = Driver()
    fact = driver_fact(lambda number: driver)
    assert (fact.found, fact.works) == ("for CUDA 13.0", True)
    assert driver.is_closed
    fact = driver_fact(no_driver)
    assert (fact.works, fact.note) == (False, "loading libcuda.so.1: no such file")


def test_a_cpu_lists_its_copy_backends():
    found = by_name([*device_facts(), attention_fact(), *copy_facts(open_driver=no_driver)])
    assert found["JAX computes on"].found == "cpu"
    assert found["device 0"].found.startswith("cpu")
    attention = found["attention by cuDNN"]
    assert (attention.works, attention.note) == (False, "JAX computes on cpu, not on a GPU")
    ways = ("buffer_callback", "io_callback", "pinned_host")
    assert all(found[f"into slots by {name}"].works for name in ways)
    assert found["into slots by buffer_callback"].note == "used here"
    assert found["out of slots by host"].note == "used here"
    for name in ("by copy_engine", "by pallas", "CUDA driver"):
        assert found[name].works is False
    assert found["by pallas"].note == "JAX computes on cpu, not on a GPU"


class Trials:
    """A copy backend that records when it is tried."""

    def __init__(self, name, tried):
        self.name, self._tried = name, tried

    def compile(self, use, placement):
        self._tried.append(self.name)
        raise NotImplementedError(f"{self.name} of a test")


def test_kernels_are_tried_last():
    tried: list[str] = []
    into = [Trials(name, tried) for name in ("copy_engine", "pallas", "pinned_host")]
    out_of: list[Any] = [Trials(name, tried) for name in ("copy_engine", "pallas", "host")]
    ways = CopyBackends(into, out_of)
    facts = [fact.name for fact in copy_facts(lambda *_, **__: ways, no_driver)]
    assert tried == ["copy_engine", "pinned_host", "copy_engine", "host", "pallas", "pallas"]
    assert facts == [
        "CUDA driver",
        "into slots by copy_engine", "into slots by pallas", "into slots by pinned_host",
        "out of slots by copy_engine", "out of slots by pallas", "out of slots by host",
    ]  # fmt: skip


def test_broken_backends_have_reasons():
    ending, closed = ExitStack(), []
    ending.callback(closed.append, True)
    absent = UnavailableBackend("copy_engine", CudaError("cuInit", 100, "CUDA_ERROR_NO_DEVICE"))
    ways = CopyBackends([absent, PinnedHostSend()], [absent, HostReceive()], None, ending)
    found = by_name(copy_facts(lambda *_, **__: ways, no_driver))
    assert found["into slots by copy_engine"].works is False
    assert "cuInit gave 100 (CUDA_ERROR_NO_DEVICE)" in found["into slots by copy_engine"].note
    assert found["into slots by pinned_host"].note == "used here"
    assert found["out of slots by copy_engine"].works is False
    assert found["out of slots by host"].works
    assert "by copy_engine" not in found
    assert closed == [True]
