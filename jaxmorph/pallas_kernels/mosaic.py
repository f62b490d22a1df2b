"""The only module that knows Pallas's Mosaic GPU backend, its versions and its requirements.

It imports nothing of Pallas before a kernel is traced or required, so everything else runs on a JAX
without that backend.

It uses two parts of JAX that are not public API:

- `jaxlib.mlir`: the bindings with which a kernel's body emits `llvm.inline_asm`. Pallas documents
  `inline_mgpu` for code at that level, but has no bindings of its own. No public API reaches an
  address outside JAX's arrays, or a release at system scope.
- `jax.experimental.mosaic.gpu.utils.memref_ptr`: an array's address inside the kernel.

JAX 0.10.2 has no public name for `LoweringSemantics`, and its default is `Lane`: the body is one
thread's program. In 0.11.2 and 0.12 the default is another.
"""

import functools
import platform
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax

from jaxmorph.pallas_kernels.tuning import WARPGROUP_THREADS, Tiling

_LEAST = (9, 0)
_HOSTS = ("x86_64", "amd64")


def assembled_kernel(
    name: str,
    assembly: str,
    outputs: Sequence[jax.ShapeDtypeStruct],
    tiling: Tiling,
) -> Callable[..., Any]:
    """A traceable function whose body is a block of PTX.

    Args:
        assembly: Every thread's program; `$0`, `$1` ... are the addresses of inputs, then outputs.
        outputs: Their shapes and dtypes.

    Returns:
        A function of the inputs that returns the list of outputs.

    Raises:
        ImportError: If this JAX has no Mosaic GPU backend that can be imported.
    """
    mosaic = _mosaic()

    def body(*references: Any) -> None:
        @mosaic.plgpu.inline_mgpu(arg_types=(mosaic.plgpu.RefType(),) * len(references))
        def emit(context: Any, *memories: Any) -> None:
            del context
            _emit(mosaic, assembly, memories)

        emit(*references)

    body.__name__ = name
    return mosaic.plgpu.kernel(
        body,
        out_type=tuple(outputs),
        grid=(tiling.ctas,),
        grid_names=("cta",),
        num_threads=tiling.threads // WARPGROUP_THREADS,
        thread_name="warpgroup",
        compiler_params=_parameters(mosaic.plgpu),
    )


def _emit(mosaic: SimpleNamespace, assembly: str, memories: Sequence[Any]) -> None:
    ir, llvm = mosaic.ir, mosaic.llvm
    i64 = ir.IntegerType.get_signless(64)
    addresses = [llvm.ptrtoint(i64, mosaic.utils.memref_ptr(memory)) for memory in memories]
    constraints = ",".join(["l"] * len(addresses) + ["~{memory}"])
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, addresses, assembly, constraints, has_side_effects=True)


def _parameters(plgpu: Any) -> Any:
    if not hasattr(plgpu, "LoweringSemantics"):
        return plgpu.CompilerParams()
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


@functools.cache
def _mosaic() -> SimpleNamespace:
    try:
        from jax.experimental.mosaic.gpu import utils
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm
    except Exception as error:  # any error at all: the kernels are unavailable
        raise ImportError(
            f"the copy kernels need Pallas's Mosaic GPU backend, and with JAX {jax.__version__} "
            f"importing it fails here: {error!r}"
        ) from error
    return SimpleNamespace(plgpu=plgpu, utils=utils, ir=ir, llvm=llvm)


class NoKernelsError(RuntimeError):
    """The kernels don't support this device or its host."""


def require_kernels(device: Any, host: str | None = None) -> None:
    """Raise unless the kernels support a device, and their memory order holds on its host.

    Args:
        device: A JAX device.
        host: The machine that sees their writes, as `platform.machine()`; None: this one.

    Raises:
        NoKernelsError: If not; the message names what is supported.
        ImportError: If JAX has no Mosaic GPU backend here.
    """
    _require_cuda(device)
    _require_capability(device)
    _require_order(platform.machine() if host is None else host)
    _mosaic()


def _require_cuda(device: Any) -> None:
    try:
        is_cuda = device in jax.devices("cuda")
    except RuntimeError:  # JAX has no CUDA platform
        is_cuda = False
    if not is_cuda:
        raise NoKernelsError(f"got {device.device_kind} ({device.platform}), expected a CUDA GPU")


def _require_capability(device: Any) -> None:
    capability = str(getattr(device, "compute_capability", None))
    found = re.fullmatch(r"(\d+)\.(\d+)", capability)
    if found is None:
        raise NoKernelsError(
            f"got compute capability {capability} ({device.device_kind}), expected 9.0 or later"
        )
    major, minor = map(int, found.groups())
    if (major, minor) < _LEAST:
        raise NoKernelsError(
            f"got sm_{major}{minor} ({device.device_kind}), expected sm_90 or later"
        )


def _require_order(host: str) -> None:
    if host.lower() not in _HOSTS:
        raise NoKernelsError(
            f"got a host of {host}, expected x86_64: only there is it "
            "proven that a reader of a signal sees the payload"
        )
