"""One stage's programs on one microbatch, against the same layers as plain JAX: times and MFU."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.child import Row
from jaxmorph.models.gpt2 import build
from jaxmorph.models.gpt2.model import GPT2
from jaxmorph.stage.build import OP_KINDS, StagePrograms, build_stage
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import (
    MicrobatchShapes,
    PipelineModel,
    key_numbers,
    without_randomness,
)
from jaxmorph.stage.model_flops import peak_tflops
from jaxmorph.stage.parameters import init_stage_params
from jaxmorph.stage.sharding import place_params

OP_NAMES = ("F", "B", "W", "BW", "plain")
"""The stage's programs, and the plain one: forward and backward of the layers in one."""

_LEAST_SHARE = 0.95  # of plain JAX's speed
_CUDNN_SINCE = (8, 0)  # the compute capability since which cuDNN has attention for these sizes
_GROUP = 4  # microbatches of one W
WARM_UPS = 2


@dataclass(frozen=True)
class Sizes:
    """The sizes of a GPT-2 stage and of a microbatch.

    Attributes:
        vocab_size: Only of a stage that embeds or has the head.
    """

    width: int
    num_heads: int
    num_layers: int
    sequence_length: int
    microbatch_size: int
    vocab_size: int = 256

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers, width {self.width}, {self.num_heads} heads, "
            f"{self.microbatch_size} x {self.sequence_length} tokens"
        )


# A quarter of the layers of GPT-2 medium, twice as wide: enough to keep a large GPU busy.
LARGE = Sizes(2048, 16, num_layers=6, sequence_length=1024, microbatch_size=4)
SMALL = Sizes(64, 2, num_layers=2, sequence_length=32, microbatch_size=2)


def is_small(asked: bool) -> bool:
    """Whether sizes are small: where the user asked for it, or there is no GPU."""
    return asked or jax.default_backend() == "cpu"


def build_gpt2(sizes: Sizes, compute_dtype: str, attention: str = "auto") -> GPT2:
    """The model that a stage is cut from."""
    return build(
        preset="tiny",
        sequence_length=sizes.sequence_length,
        vocab_size=sizes.vocab_size,
        compute_dtype=compute_dtype,
        width=sizes.width,
        num_heads=sizes.num_heads,
        num_layers=sizes.num_layers,
        attention=attention,
    )


def build_lone_stage(
    model: PipelineModel,
    sizes: Sizes,
    kinds: Collection[str] = OP_KINDS,
    shapes: MicrobatchShapes | None = None,
    num_devices: int = 1,
    weight_group: int = 1,
) -> StagePrograms:
    """The compiled programs of a stage of layers alone on this process's first devices.

    Args:
        shapes: A microbatch; None: tokens of text.
    """
    return build_stage(
        model,
        stage_submesh(make_mesh(1, num_devices), 0),
        num_layers=sizes.num_layers,
        is_first=False,
        is_last=False,
        shapes=shapes or MicrobatchShapes.of_text(sizes.microbatch_size, sizes.sequence_length),
        kinds=kinds,
        weight_group=weight_group,
    )


def plain_step(model: PipelineModel) -> Callable[..., Any]:
    """The layers' forward and whole backward as one jitted program that knows no stages.

    Returns:
        A function of (parameters, activations, gradient of the output, float32 sums of gradients,
        which are donated) to (a scalar, the input's gradient, the sums).
    """

    def loss(params: Any, x: jax.Array, gradient: jax.Array) -> jax.Array:
        layers = params["layers"]
        y, _ = jax.lax.scan(lambda x, layer: (model.layer(layer, x), None), x, layers)
        return jnp.vdot(y.astype(jnp.float32), gradient.astype(jnp.float32))

    def step(params: Any, x: jax.Array, gradient: jax.Array, sums: Any) -> Any:
        value, grads = jax.value_and_grad(loss, argnums=(0, 1))(params, x, gradient)
        return value, grads[1], jax.tree.map(jnp.add, sums, grads[0])

    return jax.jit(step, donate_argnums=3)


class StageOps:
    """A middle stage's programs on one microbatch, each of which can be timed.

    Args:
        shapes: The microbatch, of whose extras all are one; None: tokens of text.
        weight_group: The microbatches of W, all alike.
    """

    def __init__(
        self,
        model: PipelineModel,
        programs: StagePrograms,
        sizes: Sizes,
        shapes: MicrobatchShapes | None = None,
        num_devices: int = 1,
        weight_group: int = 1,
    ) -> None:
        shapes = shapes or MicrobatchShapes.of_text(sizes.microbatch_size, sizes.sequence_length)
        functions = programs.functions
        extras = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes.extras)
        key = key_numbers(0, 0, 0, 0) if functions.reads_keys else None
        more = (None, key, functions.with_extras(extras))
        self._aux = (jnp.ones(functions.num_aux),) if functions.num_aux else ()
        layers = range(sizes.num_layers)
        params = init_stage_params(model, jax.random.key(0), layers, is_first=False, is_last=False)
        submesh = stage_submesh(make_mesh(1, num_devices), 0)
        self._params = place_params(params, programs.specs, submesh)
        self._programs, self._weights = programs, programs.prepare(self._params)
        x = _random_activations(model, shapes)
        _, of_x, *_ = programs.compiled["F"].input_shardings[0]
        self._x = jax.device_put(x, of_x)
        self._plain = plain_step(model)
        self._sums = programs.zero_accumulators()
        _, self._stash, *_ = programs.forward(self._weights, self._x, *more)
        given = (self._weights, self._stash, self._x, *self._aux)
        each = [programs.backward_input(*given)[1] for _ in range(weight_group)]
        self._weight_stashes = tuple(each)
        self._calls = {
            "F": lambda: programs.forward(self._weights, self._x, *more),
            "B": lambda: programs.backward_input(*given),
            "W": self._backward_weight,
            "BW": self._backward,
            "plain": self._forward_and_backward,
            "prepare": lambda: programs.prepare(self._params),
        }

    def _backward_weight(self) -> Any:
        self._sums, done = self._programs.backward_weight(
            self._weights, self._weight_stashes, self._sums
        )
        return done

    def _backward(self) -> Any:
        gradient, self._sums, done = self._programs.backward(
            self._weights, self._stash, self._x, self._sums, *self._aux
        )
        return gradient, done

    def _forward_and_backward(self) -> Any:
        value, gradient, self._sums = self._plain(self._params, self._x, self._x, self._sums)
        return value, gradient

    def time_s(self, name: str, calls: int) -> float:
        """Seconds of a call of a program, the mean of some in a row.

        Args:
            name: One of `OP_NAMES`, or "prepare", which makes a step's weights.
        """
        jax.block_until_ready((self._sums, self._weight_stashes))
        began_s = time.perf_counter()
        jax.block_until_ready([self._calls[name]() for _ in range(calls)])
        return (time.perf_counter() - began_s) / calls


def median_times_s(
    ops: StageOps, repeats: int, calls: int = 1, names: Collection[str] = OP_NAMES
) -> dict[str, float]:
    """The median time of a call of each program; the repeats of all of them take turns.

    Args:
        repeats: How often each is timed, after some times that don't count.
        calls: How many calls one timing has.
    """
    rounds = [{name: ops.time_s(name, calls) for name in names} for _ in range(repeats + WARM_UPS)]
    return {name: median(each[name] for each in rounds[WARM_UPS:]) for name in names}


def _random_activations(model: PipelineModel, shapes: MicrobatchShapes) -> jax.Array:
    """Of the shape and dtype that the model's layers take."""
    key, embed = jax.random.key(0), without_randomness(model.embed)
    shape = jax.eval_shape(embed, jax.eval_shape(model.init_embed, key), shapes.inputs)
    return jax.random.normal(key, shape.shape).astype(shape.dtype)


def model_flops(sizes: Sizes, attention: str = "xla") -> dict[str, float]:
    """The floating-point operations of each program's matrix products on one microbatch.

    A product of a layer's weights with one token's activations is 2 FLOPs for each of the 12 width²
    weights: the forward does it once, and the backward twice, for the input's gradient (in B) and
    for the weights' (in W). Attention's two products are 2 x 2 x sequence x width FLOPs a token,
    over the whole square of positions, as XLA computes it; cuDNN leaves out what the mask hides, so
    that a token has half of the sequence before it on average. The backward has four such products,
    all in B. Nothing else is counted: no normalisation, no softmax, and nothing that is computed
    again, as cuDNN's backward does with the first product.
    """
    tokens = sizes.microbatch_size * sizes.sequence_length
    weights = tokens * sizes.num_layers * 2.0 * 12 * sizes.width**2
    length = sizes.sequence_length
    seen = (length + 1) / 2 if attention == "cudnn" else length
    pairs = tokens * sizes.num_layers * 2.0 * 2 * seen * sizes.width
    return {
        "F": weights + pairs,
        "B": weights + 2 * pairs,
        "W": weights,
        "BW": 2 * weights + 2 * pairs,
        "plain": 3 * weights + 3 * pairs,
    }


def measure_stage(*, small: bool) -> Iterator[Row]:
    """How fast F, B, W and BW are in bfloat16, and plain JAX on the same layers."""
    sizes, repeats, calls = (SMALL, 3, 2) if is_small(small) else (LARGE, 15, 5)
    device = jax.devices()[0]
    yield Row("stage", "bfloat16", str(sizes))
    model = build_gpt2(sizes, "bfloat16")
    choice = model.attention(sizes.microbatch_size, sizes.sequence_length)
    by, why = choice.implementation, choice.why_not_cudnn
    failed = _lacks_cudnn(by, device)
    try:
        programs = build_lone_stage(model, sizes)
    except Exception as error:
        if by != "cudnn":
            raise
        # Measure the rest all the same.
        by, why, failed = "xla", " ".join(f"{type(error).__name__}: {error}".split())[:300], True
        model = build_gpt2(sizes, "bfloat16", attention="xla")
        programs = build_lone_stage(model, sizes)
    yield Row("attention by", by, why, False if failed else None)
    times_s = median_times_s(
        StageOps(model, programs, sizes), repeats, calls, (*OP_NAMES, "prepare")
    )
    flops, peak = model_flops(sizes, by), peak_tflops(device.device_kind)
    for name in OP_NAMES:
        rate = flops[name] / times_s[name] / 1e12
        figures = {"ms": 1e3 * times_s[name], "tflops": rate, "mfu": rate / peak if peak else None}
        share = f", MFU {rate / peak:.1%}" if peak else ""
        yield Row(name, f"{figures['ms']:.3f} ms", f"{rate:.3g} TFLOP/s{share}", None, figures)
    yield Row("prepare", f"{1e3 * times_s['prepare']:.3f} ms", "weights to bfloat16, once a step")
    yield from _ratios(times_s, is_judged=device.platform != "cpu")
    grouped = build_lone_stage(model, sizes, kinds=("F", "B", "W"), weight_group=_GROUP)
    one_for_all = StageOps(model, grouped, sizes, weight_group=_GROUP)
    group_s = median_times_s(one_for_all, repeats, calls, names=("W",))["W"]
    share = group_s / (_GROUP * times_s["W"])
    note = f"of the time of {_GROUP}; below 1 `schedule.weight_group: {_GROUP}` is faster"
    yield Row(f"one W for {_GROUP}", f"{share:.3f}", note, None, {"x": share})


def _ratios(seconds: Mapping[str, float], *, is_judged: bool) -> Iterator[Row]:
    """What the split costs, and what a stage costs against plain JAX."""
    split = (seconds["B"] + seconds["W"]) / seconds["BW"]
    yield Row("(B+W)/BW", f"{split:.3f}", "what splitting the backward costs", None, {"x": split})
    ratio, most = (seconds["F"] + seconds["BW"]) / seconds["plain"], 1 / _LEAST_SHARE
    note = f"at most {most:.3f} on a GPU: {_LEAST_SHARE:.0%} of plain JAX's MFU"
    holds = bool(ratio <= most) if is_judged else None
    yield Row("(F+BW)/plain", f"{ratio:.3f}", note, holds, {"x": ratio})


def _lacks_cudnn(by: str, device: Any) -> bool:
    """Whether attention isn't cuDNN's though the device is one that cuDNN has it for."""
    capability = getattr(device, "compute_capability", None) or "0.0"
    return by != "cudnn" and tuple(map(int, capability.split("."))) >= _CUDNN_SINCE
