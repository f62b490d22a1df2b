"""What is installed, which device there is, and whether its driver takes the memory of slots."""

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import jax

from benchmarks.gpu.child import Row
from benchmarks.gpu.stage import is_small
from jaxmorph.cli.doctor_accelerators import device_facts
from jaxmorph.cli.doctor_host import nvidia_facts, software_facts
from jaxmorph.copies.cuda_driver import CudaDriver
from jaxmorph.records import in_bytes
from jaxmorph.stage.model_flops import peak_tflops
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import ChannelSpec, OutgoingEnd

_PREFIXES = ("JAX_", "XLA_", "NCCL_", "CUDA_")
_SLOTS = 4


def look_at_environment(*, small: bool) -> Iterator[Row]:
    """Versions, device, driver and flags; whether there is a GPU at all."""
    for fact in (*software_facts(), *nvidia_facts(), *device_facts()):
        yield Row(fact.name, fact.found, fact.note)
    device = jax.devices()[0]
    yield Row("platform", " ".join(device.client.platform_version.split())[:80])
    peak = peak_tflops(device.device_kind)
    text = f"{peak:.0f} TFLOP/s" if peak else "unknown"
    yield Row("peak, dense bfloat16", text, "" if peak else "so there is no MFU")
    for name in sorted(os.environ):
        if name.startswith(_PREFIXES):
            yield Row(name, os.environ[name])
    is_gpu = device.platform != "cpu"
    note = "" if is_gpu else "small sizes on the CPU; their times mean nothing"
    yield Row("GPU", "yes" if is_gpu else "no", note, is_gpu or (None if small else False))


def measure_registration(*, small: bool) -> Iterator[Row]:
    """Make slots, and have the driver know them, forget them and know them again."""
    num_bytes = 1 << 20 if is_small(small) else 256 << 20
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit == resource.RLIM_INFINITY
    yield Row("memory that may be locked", "unlimited" if unlimited else in_bytes(limit))
    spec = ChannelSpec(ChannelName(0, 0, 1), num_bytes // _SLOTS, _SLOTS)
    began_s = time.perf_counter()
    with closing(OutgoingEnd(spec, 0, lambda: None)) as end:
        for number in range(_SLOTS):
            end.slots.payload(number)[:] = 1
        yield _seconds("create slots", time.perf_counter() - began_s, in_bytes(num_bytes))
        device = jax.devices()[0]
        if device.platform == "cpu":
            yield Row("register slots", "none", "a CPU needs none of it")
            return
        address, mapped_bytes = end.slots.memory
        with closing(CudaDriver.open(device.local_hardware_id or 0)) as driver:
            for name in ("register slots", "register them again"):
                found: list[int] = []
                took_s = _timed(lambda: found.append(driver.register(address, mapped_bytes)))  # noqa: B023
                same = "this process's" if found == [address] else "another than this process's"
                yield _seconds(name, took_s, f"the device's address is {same}", holds=True)
                yield _seconds("unregister slots", _timed(lambda: driver.unregister(address)))


def _timed(call: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def _seconds(name: str, took_s: float, note: str = "", *, holds: bool | None = None) -> Row:
    return Row(name, f"{took_s:.3f} s", note, holds, {"seconds": took_s})
