"""Measures how long the embedding, a layer and the head take, on one device without a pipeline."""

import time
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxmorph.stage.activations import with_one_activation
from jaxmorph.stage.backward import split_backward
from jaxmorph.stage.build import OP_KINDS, build_stage
from jaxmorph.stage.model import (
    MicrobatchShapes,
    PipelineModel,
    Tree,
    key_numbers,
    without_randomness,
)
from jaxmorph.stage.parameters import init_stage_params
from jaxmorph.stage.stage_functions import StashPolicy

_MIN_RUNS, _MAX_RUNS = 5, 30  # timed microbatches of each part
_ENOUGH_S = 0.5  # after this time, stop at _MIN_RUNS
# Two layers are measured, not one: a stage loops over its layers, and the loop's stacking of
# stashes and slicing of weights is part of a layer's cost.
_LAYERS = 2

Sums = Any
"""Gradients summed over microbatches: the timed programs take them and return them."""

Ops = Generator[Any, None, Sums]
"""Runs a microbatch's ops; yields the results of each but the last, and returns the sums."""


@dataclass(frozen=True)
class LayerCosts:
    """The times of one microbatch's ops, F, B and W or F and BW, in milliseconds.

    Those of the head include the loss.
    """

    embed_ms: tuple[float, ...]
    layer_ms: tuple[float, ...]
    head_ms: tuple[float, ...]


def measure_layer_costs(
    model: PipelineModel,
    submesh: Mesh,
    microbatch: MicrobatchShapes,
    *,
    stash: StashPolicy = "full",
    kinds: Collection[str] = OP_KINDS,
) -> LayerCosts:
    """Returns the median times of a microbatch's F, B and W, or F and BW, on each part of a model.

    Programs run on real data with initial parameters. Only one part is on the device at a time, and
    none when this returns.

    Args:
      submesh: one device, from `stage_submesh`.
      microbatch: its arrays in place of their shapes.
      kinds: the kinds of op that the schedule runs; backwards are split if "W" is among them.
    """
    key, is_split = jax.random.key(0), "W" in kinds
    with jax.default_device(submesh.devices.flat[0]):
        trees = (microbatch.inputs, microbatch.targets, microbatch.extras)
        microbatch = MicrobatchShapes(*jax.tree.map(jnp.asarray, trees))
        model, _ = with_one_activation(model, microbatch.inputs)
        embed_params = jax.jit(model.init_embed)(key)
        activations = jax.jit(without_randomness(model.embed))(embed_params, microbatch.inputs)
        embed_ms = _part_ms(model.embed, embed_params, (microbatch.inputs,), is_split=is_split)
        del embed_params
        layer_ms = _layer_ms(model, submesh, microbatch, activations, stash, kinds)
        head_params = jax.jit(model.init_head)(key)
        data, extras = (microbatch.targets,), microbatch.extras
        head_ms = _part_ms(
            model.head, head_params, data, activations, extras=extras, is_split=is_split
        )
    return LayerCosts(embed_ms, layer_ms, head_ms)


def _layer_ms(
    model: PipelineModel,
    submesh: Mesh,
    microbatch: MicrobatchShapes,
    activations: jax.Array,
    stash: StashPolicy,
    kinds: Collection[str],
) -> tuple[float, ...]:
    """One layer's share of the times of a stage without embedding and head."""
    num_layers = min(_LAYERS, model.num_layers)
    stage = build_stage(
        model,
        submesh,
        num_layers=num_layers,
        is_first=False,
        is_last=False,
        shapes=microbatch,
        stash=stash,
        kinds=kinds,
    )
    params = init_stage_params(model, jax.random.key(0), range(num_layers), False, False)
    weights = stage.prepare(params)
    numbers = key_numbers(0, 0, 0, 0) if stage.functions.reads_keys else None
    extras = stage.functions.with_extras(microbatch.extras)
    aux_gradient = [np.ones(count, np.float32)] if (count := stage.functions.num_aux) else []

    def run(sums: Sums) -> Ops:
        output, kept, *_ = stage.forward(weights, activations, key_numbers=numbers, extras=extras)
        yield output, kept
        if "W" not in kinds:
            return stage.backward(weights, kept, output, sums, *aux_gradient)[1]
        _, weight_stash, _ = stage.backward_input(weights, kept, output, *aux_gradient)
        yield weight_stash
        return stage.backward_weight(weights, (weight_stash,), sums)[0]

    return tuple(time_ms / num_layers for time_ms in _median_ms(run, stage.zero_accumulators()))


def _part_ms(
    function: Callable,
    params: Any,
    data: tuple[Tree],
    *inputs: jax.Array,
    extras: Mapping[str, Tree] | None = None,
    is_split: bool,
) -> tuple[float, ...]:
    """The times of the embedding or the head alone."""
    split = split_backward(function, params, *inputs, data=data, extras=extras)
    all_extras = jax.tree.leaves(extras)
    inputs = (*inputs, *jax.tree.leaves(data), *(all_extras[at] for at in split.extras))
    leaves = jax.tree.leaves(params)
    pool = [*leaves, *jax.jit(split.prepare)(*leaves)]
    weights = [pool[source] for source in split.weight_sources]
    key = (jax.random.key_data(jax.random.key(0)),) if split.reads_key else ()
    forward, backward_input = jax.jit(split.forward), jax.jit(split.backward_input)
    backward_weight = _adding(split.backward_weight, skip=0)
    backward = _adding(split.backward, skip=split.num_input_gradients)

    def run(sums: Sums) -> Ops:
        output, *kept = forward(*weights, *inputs, *key)
        yield output, kept
        if not is_split:
            return backward(sums, *weights, *kept, output)
        new = backward_input(*weights, *kept, output)[split.num_input_gradients :]
        yield new
        return backward_weight(sums, *weights, *[kept[i] for i in split.passed_on], *new)

    return _median_ms(run, [jnp.zeros(leaf.shape, jnp.float32) for leaf in leaves])


def _adding(part: Callable, skip: int) -> Callable[..., Sums]:
    """Compiles a part of a backward to add its results, without the first `skip`, to sums."""

    def added(sums: Sums, *arrays: jax.Array) -> Sums:
        gradients = part(*arrays)[skip:]
        return [total + gradient for total, gradient in zip(sums, gradients, strict=True)]

    return jax.jit(added, donate_argnums=0)


def _median_ms(run: Callable[[Sums], Ops], sums: Sums) -> tuple[float, ...]:
    """The median time of each op, after a first run that may compile."""
    sums, _ = _timed_ms(run(sums))
    times_ms: list[list[float]] = []
    until_s = time.perf_counter() + _ENOUGH_S
    while len(times_ms) < _MIN_RUNS or (
        len(times_ms) < _MAX_RUNS and time.perf_counter() < until_s
    ):
        sums, of_ops = _timed_ms(run(sums))
        times_ms.append(of_ops)
    return tuple(map(median, zip(*times_ms, strict=True)))


def _timed_ms(ops: Ops) -> tuple[Sums, list[float]]:
    """Runs a microbatch; returns the sums, and the time of each op."""
    ends_s = [time.perf_counter()]
    while True:
        try:
            jax.block_until_ready(next(ops))
        except StopIteration as last:
            sums = jax.block_until_ready(last.value)
            ends_s.append(time.perf_counter())
            return sums, [1e3 * (end_s - began_s) for began_s, end_s in pairwise(ends_s)]
        ends_s.append(time.perf_counter())
