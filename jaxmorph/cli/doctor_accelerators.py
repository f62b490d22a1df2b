"""Devices, the CUDA driver, and the backends for copies between a device and slots."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxmorph.cli.doctor_host import Fact
from jaxmorph.copies.choosing import CopyBackends, OpenDriver, copy_backends, failure_reason
from jaxmorph.copies.copy_engine import CopyEngineSend
from jaxmorph.copies.cuda_driver import CudaDriver, CudaError
from jaxmorph.copies.kernels import KernelSend
from jaxmorph.copies.trial import try_receive, try_send
from jaxmorph.runtime.join import own_devices
from jaxmorph.runtime.xla_settings import gpu_settings, unknown_flags, value_in_force

_GIB = 1 << 30
_KERNELS = KernelSend.name
_HEADS = (1, 128, 1, 64)  # [batch, sequence, heads, head width], small


def device_facts() -> Iterator[Fact]:
    """The devices of JAX."""
    devices = own_devices()
    yield Fact("JAX computes on", jax.default_backend(), True)
    for device in devices:
        found = f"{device.device_kind}{_capability(device)}{_memory(device)}"
        yield Fact(f"device {device.id}", found)


def attention_fact(compile_: Callable[[Any], None] | None = None) -> Fact:
    """Whether a small attention by cuDNN compiles for the first device."""
    device, name = own_devices()[0], "attention by cuDNN"
    if device.platform == "cpu":
        return Fact(name, "no", False, "JAX computes on cpu, not on a GPU")
    try:
        (compile_ or _compile_attention)(device)
    except Exception as error:  # any error is the answer
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Fact(name, "no", False, reason)
    return Fact(name, "yes", True, "used here in bfloat16")


def _compile_attention(device: Any) -> None:
    def total(*heads: jax.Array) -> jax.Array:
        context = jax.nn.dot_product_attention(*heads, is_causal=True, implementation="cudnn")
        return context.astype(jnp.float32).sum()

    placed = SingleDeviceSharding(device)
    heads = [jax.ShapeDtypeStruct(_HEADS, jnp.bfloat16, sharding=placed)] * 3
    jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*heads).compile()


def setting_facts(
    unknown: Callable[[Sequence[str]], frozenset[str]] = unknown_flags,
) -> Iterator[Fact]:
    """What ranks on GPUs set unless the user does, and whether this JAX knows each flag."""
    settings = {
        each: when
        for fails_over, when in ((False, "without failover: "), (True, "with failover: "))
        for each in gpu_settings(fails_over=fails_over)
    }
    always = set(gpu_settings(fails_over=False)) & set(gpu_settings(fails_over=True))
    missing = unknown([each.as_flag for each in settings if each.is_flag])
    for each, when in settings.items():
        own, known = value_in_force(each), each.as_flag not in missing
        if not known:
            note = "this JAX doesn't know the flag, so ranks go without"
        elif own is None:
            note = f"{'' if each in always else when}{each.why}"
        else:
            note = f"yours; ranks would have {each.value}"
        yield Fact(each.name, own or each.value, known if each.is_flag else None, note)


def driver_fact(open_driver: OpenDriver = CudaDriver.open, number: int = 0) -> Fact:
    """Whether there is a CUDA driver for copies."""
    try:
        driver = open_driver(number)
    except CudaError as error:
        return Fact("CUDA driver", "none", False, str(error))
    try:
        return Fact("CUDA driver", f"for CUDA {driver.version()}", True)
    finally:
        driver.close()


def copy_facts(
    open_backends: Callable[..., CopyBackends] = copy_backends,
    open_driver: OpenDriver = CudaDriver.open,
) -> Iterator[Fact]:
    """The copy backends that work on the first device, the best first, and why others don't."""
    yield driver_fact(open_driver)
    device = own_devices()[0]
    placement = SingleDeviceSharding(device)
    available = open_backends(placement, lambda registry: None, open_driver=open_driver)
    with closing(available):
        trial: dict[str, Any] = {"placement": placement, "registry": available.memory}
        into: Callable[[Any], None] = partial(try_send, **trial)
        out_of: Callable[[Any], None] = partial(try_receive, **trial)
        backends = [
            *((f"into slots by {each.name}", each, into) for each in available.outgoing),
            *((f"out of slots by {each.name}", each, out_of) for each in available.incoming),
        ]
        facts = {
            name: _fact(name, failure_reason(backend, attempt))
            # Kernels last: after a kernel that fails, nothing else on the device works.
            for name, backend, attempt in sorted(
                backends, key=lambda each: each[1].name == _KERNELS
            )
        }
    for way in (into, out_of):
        yield from _best_first([facts[name] for name, _, attempt in backends if attempt is way])
    there = {backend.name for backend in available.outgoing}
    for name in (CopyEngineSend.name, _KERNELS):
        if name not in there:
            yield _fact(f"by {name}", f"JAX computes on {device.platform}, not on a GPU")


def _fact(name: str, reason: str | None) -> Fact:
    return Fact(name, "yes" if reason is None else "no", reason is None, reason or "")


def _best_first(facts: Sequence[Fact]) -> Iterator[Fact]:
    """Mark the first backend that works, which runs use."""
    used = next((fact for fact in facts if fact.works), None)
    for fact in facts:
        yield replace(fact, note="used here") if fact is used else fact


def _capability(device: Any) -> str:
    capability = getattr(device, "compute_capability", None)
    return "" if capability is None else f", compute capability {capability}"


def _memory(device: Any) -> str:
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return "" if limit is None else f", {limit / _GIB:.1f} GiB for JAX"
