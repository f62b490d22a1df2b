"""A middle stage's programs on one microbatch, and the same layers as one plain program."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from jaxmorph.gpu_check.settings import Sizes, build_gpt2
from jaxmorph.stage.build import OP_KINDS, StagePrograms, build_stage
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import PipelineModel
from jaxmorph.stage.parameters import init_stage_params

OP_NAMES = ("F", "B", "W", "BW", "plain")
"""The stage's programs, and the plain one."""


@dataclass(frozen=True)
class MiddleStage:
    """A stage that has layers alone.

    Attributes:
        model: What it is cut from.
        attention: What computes attention in it, "cudnn" or "xla".
        why: Why that isn't cuDNN; empty where it is.
        failed: Whether cuDNN can be had, but not in these programs.
    """

    model: PipelineModel
    programs: StagePrograms
    attention: str
    why: str = ""
    failed: bool = False


@cache
def middle_stage(sizes: Sizes, compute_dtype: str) -> MiddleStage:
    """A stage that has layers alone, compiled once for all parts that look at it."""
    model = build_gpt2(sizes, compute_dtype)
    choice = model.attention(sizes.microbatch_size, sizes.sequence_length)
    try:
        return MiddleStage(model, build_lone_stage(model, sizes), choice.by, choice.why)
    except Exception as error:
        if choice.by != "cudnn":
            raise
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    # The rest is to be known all the same.
    model = build_gpt2(sizes, compute_dtype, attention="xla")
    return MiddleStage(model, build_lone_stage(model, sizes), "xla", why, failed=True)


def build_lone_stage(
    model: PipelineModel,
    sizes: Sizes,
    *,
    is_whole: bool = False,
    kinds: Collection[str] = OP_KINDS,
) -> StagePrograms:
    """The compiled programs of a stage on this process's first device.

    Args:
        model: What the stage is cut from.
        is_whole: Whether it has the embedding and the head too, or layers alone.
    """
    return build_stage(
        model,
        stage_submesh(make_mesh(1), 0),
        num_layers=sizes.num_layers,
        is_first=is_whole,
        is_last=is_whole,
        microbatch_size=sizes.microbatch_size,
        sequence_length=sizes.sequence_length,
        kinds=kinds,
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
    """The programs on one microbatch, each of which can be run and timed.

    Args:
        model: What the stage is cut from.
    """

    def __init__(self, model: PipelineModel, programs: StagePrograms, sizes: Sizes) -> None:
        key = jax.random.key(0)
        layers = range(sizes.num_layers)
        self._params = init_stage_params(model, key, layers, is_first=False, is_last=False)
        self._programs, self._weights = programs, programs.prepare(self._params)
        self._x = random_activations(model, sizes)
        self._plain = plain_step(model)
        self._sums = programs.zero_accumulators()
        _, self._stash = jax.block_until_ready(programs.forward(self._weights, self._x))
        self._weight_stash = programs.backward_input(self._weights, self._stash, self._x)[1]

    def settle(self) -> None:
        """Wait until everything that was begun has run."""
        jax.block_until_ready((self._sums, self._weight_stash))

    def forward(self) -> Any:
        """Run F: (output, stash)."""
        return self._programs.forward(self._weights, self._x)

    def backward_input(self, stash: Any = None) -> Any:
        """Run B: (input gradient, weight stash)."""
        return self._programs.backward_input(self._weights, stash or self._stash, self._x)

    def _backward_weight(self) -> Any:
        self._sums, done = self._programs.backward_weight_marked(
            self._weights, self._weight_stash, self._sums
        )
        return done

    def _backward(self) -> Any:
        gradient, self._sums, done = self._programs.backward_marked(
            self._weights, self._stash, self._x, self._sums
        )
        return gradient, done

    def _forward_and_backward(self) -> Any:
        value, gradient, self._sums = self._plain(self._params, self._x, self._x, self._sums)
        return value, gradient

    def time_s(self, name: str, calls: int = 1) -> float:
        """Seconds of a call of a program, the mean of some in a row.

        Args:
            name: One of `OP_NAMES`, or "prepare", which makes a step's weights.
        """
        run = {
            "F": self.forward,
            "B": self.backward_input,
            "W": self._backward_weight,
            "BW": self._backward,
            "plain": self._forward_and_backward,
            "prepare": lambda: self._programs.prepare(self._params),
        }[name]
        self.settle()
        began_s = time.perf_counter()
        jax.block_until_ready([run() for _ in range(calls)])
        return (time.perf_counter() - began_s) / calls


def median_times_s(ops: StageOps, repeats: int, calls: int = 1) -> dict[str, float]:
    """The median time of a call of each program; the repeats of all of them take turns.

    Args:
        repeats: How often each is timed, after two times that don't count.
        calls: How many calls one timing has.
    """
    rounds = [{name: ops.time_s(name, calls) for name in OP_NAMES} for _ in range(repeats + 2)][2:]
    return {name: median(each[name] for each in rounds) for name in OP_NAMES}


def random_activations(model: PipelineModel, sizes: Sizes) -> jax.Array:
    """Random activations, of the shape and dtype that the model's layers take."""
    key = jax.random.key(0)
    tokens = jax.ShapeDtypeStruct((sizes.microbatch_size, sizes.sequence_length), jnp.int32)
    shape = jax.eval_shape(model.embed, jax.eval_shape(model.init_embed, key), tokens)
    return jax.random.normal(key, shape.shape).astype(shape.dtype)
