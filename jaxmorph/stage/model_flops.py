"""How much of a model each device computes in a step, for TFLOP/s and MFU.

Only products of matrices count: each once in the forward and twice in the backward, for the
gradients of its input and of its weights. Recomputation does not count.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jaxmorph.stage.equations import bodies_of, elements, trace_flat
from jaxmorph.stage.model import (
    MicrobatchShapes,
    Params,
    PipelineModel,
    Tree,
    without_randomness,
)

_PEAK_TFLOPS = (  # the first name found in the device's counts: variants precede their family
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("A100", 312.0),
)


def peak_tflops(device_kind: str) -> float | None:
    """Returns a device's dense bfloat16 TFLOP/s by its maker's data sheet; None: it isn't known."""
    return next((peak for name, peak in _PEAK_TFLOPS if name in device_kind), None)


@dataclass(frozen=True)
class DeviceWork:
    """What each device computes of the model in a step, if all compute the same amount.

    Attributes:
      tflop: 10^12 floating-point operations.
      peak_tflops: what the device can do in a second; None: that isn't known.
    """

    tflop: float
    peak_tflops: float | None

    @classmethod
    def of(
        cls, model: PipelineModel, microbatch: MicrobatchShapes, num_microbatches: int, devices: int
    ) -> "DeviceWork":
        """Returns the work of a step's microbatches on so many devices like the default one."""
        tflop = num_microbatches * microbatch_flops(model, microbatch) / devices / 1e12
        return cls(tflop, peak_tflops(jax.devices()[0].device_kind))

    def rates(self, step_s: float) -> dict[str, float | None]:
        """TFLOP/s of a device and MFU in a step of this length, by `StepRecord`'s field names."""
        rate = self.tflop / step_s
        mfu = None if self.peak_tflops is None else rate / self.peak_tflops
        return {"tflops_per_device": rate, "mfu": mfu}


def microbatch_flops(model: PipelineModel, microbatch: MicrobatchShapes) -> float:
    """Returns the floating-point operations of a microbatch, forward and backward."""
    key = jax.eval_shape(jax.random.key, 0)
    inits = model.init_embed, model.init_layer, model.init_head
    embed_params, layer_params, head_params = (jax.eval_shape(init, key) for init in inits)
    embed = without_randomness(model.embed)

    def layer(params: Params, x: Tree, extras: Mapping[str, Tree]) -> Tree:
        return without_randomness(model.layer, extras)(params, x)

    def head(params: Params, x: Tree, targets: Tree, extras: Mapping[str, Tree]) -> Tree:
        return without_randomness(model.head, extras)(params, x, targets)

    x, extras = jax.eval_shape(embed, embed_params, microbatch.inputs), microbatch.extras
    calls = (
        (1, embed, embed_params, microbatch.inputs),
        (model.num_layers, layer, layer_params, x, extras),
        (1, head, head_params, x, microbatch.targets, extras),
    )
    forward = (
        times * product_flops(trace_flat(function, *arguments).equations)
        for times, function, *arguments in calls
    )
    return 3 * sum(forward)


def product_flops(equations: Iterable[JaxprEqn]) -> float:
    """Returns the FLOPs of all products of matrices, those in loop bodies as often as they run.

    Of branches, the costliest counts; a loop whose length isn't known counts once.
    """
    return sum(map(_flops_of, equations))


def _flops_of(eqn: JaxprEqn) -> float:
    name, operands = eqn.primitive.name, [atom.aval for atom in eqn.invars]
    if name == "dot_general":
        (axes, _), _ = eqn.params["dimension_numbers"]
        return 2.0 * elements(eqn.outvars[0]) * math.prod(_shape(operands[0])[at] for at in axes)
    if name.startswith("ragged_dot"):  # each row of the first operand meets one group's matrix
        return 2.0 * elements(eqn.outvars[0]) * _shape(operands[0])[-1]
    if name == "conv_general_dilated":
        of_output = _shape(operands[1])[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * elements(eqn.outvars[0]) * math.prod(_shape(operands[1])) / of_output
    if name.startswith("dot_product_attention"):
        return _flops_of_cudnn(eqn)
    bodies = [product_flops(body.eqns) for body in bodies_of(eqn)]
    if name == "cond":
        return max(bodies, default=0.0)
    return sum(bodies) * (eqn.params["length"] if name == "scan" else 1)


def _flops_of_cudnn(eqn: JaxprEqn) -> float:
    """Both products of cuDNN's attention, which leaves out what a causal mask hides."""
    query, key = (_shape(atom.aval) for atom in eqn.invars[:2])
    # Layout 0 is [batch, length, heads, width], and 1 has the heads before the length.
    layout = eqn.params["layout"]
    length = key[2 if getattr(layout, "value", layout) else 1]
    is_causal = "CAUSAL" in getattr(eqn.params["mask_type"], "name", "")
    return 2 * 2.0 * math.prod(query) * ((length + 1) / 2 if is_causal else length)


def _shape(aval: Any) -> tuple[int, ...]:
    return aval.shape
