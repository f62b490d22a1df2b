"""Training on one device, as plain JAX and Optax have it: what two stages are compared with."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmorph.gpu_check.settings import Sizes
from jaxmorph.gpu_check.stage_task import CLIP_NORM, NUM_STAGES, batch_of, optimizer_of
from jaxmorph.gpu_check.stage_training import GRADIENT, PARAMETER, stage_arrays
from jaxmorph.gpu_check.whole_model import WholeModel, whole_model
from jaxmorph.stage.model import Params, PipelineModel, cut_layers
from jaxmorph.stage.parameters import leaf_at, with_leaf


@dataclass(frozen=True)
class PlainTraining:
    """Some steps on one device.

    Attributes:
        losses: Mean loss of every step.
        norms: Norm of every step's gradients, before they are clipped.
        step_ms: The median of a step.
        began: For each stage its part of the initial parameters, by name.
        ended: For each stage its part of the first step's gradients and of the last parameters.
    """

    losses: list[float]
    norms: list[float]
    step_ms: float
    began: Sequence[Mapping[str, np.ndarray]]
    ended: Sequence[Mapping[str, np.ndarray]]


def train_plainly(sizes: Sizes, num_steps: int) -> PlainTraining:
    """Train a whole model on JAX's first device, in float32 with the highest precision."""
    whole = whole_model(sizes)
    params = tied_copies(whole.model, whole.params)
    began, first = params, {}
    state = jax.jit(_optimizer(sizes).init)(params)
    step = _compiled_step(whole, sizes, state)
    losses, norms, took_s = [], [], []
    for number in range(num_steps):
        began_s = time.perf_counter()
        loss, gradients, norm, params, state = step(params, state, *batch_of(sizes, number))
        jax.block_until_ready(params)
        took_s.append(time.perf_counter() - began_s)
        first = first or gradients
        losses.append(float(loss))
        norms.append(float(norm))
    return PlainTraining(
        losses,
        norms,
        step_ms=1e3 * median(took_s),
        began=_by_stage(whole.model, {PARAMETER: began}),
        ended=_by_stage(whole.model, {GRADIENT: first, PARAMETER: params}),
    )


def tied_copies(model: PipelineModel, tree: Params) -> Params:
    """A whole model's tree in which the head has copies of what it shares with the embedding.

    Args:
        tree: Of its parameters, or of as many gradients.
    """
    for embed, head in model.tied:
        tree = with_leaf(tree, ("head", *head), leaf_at(tree["embed"], embed))
    return tree


def _compiled_step(whole: WholeModel, sizes: Sizes, state: Any) -> Any:
    """A step: (loss, gradients, their norm, parameters, the optimizer's state)."""
    optimizer, model = _optimizer(sizes), whole.model

    def loss_sum(params: Params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        params = tied_copies(model, params)  # so one copy's gradient is that of both uses
        x = model.embed(params["embed"], tokens)
        x, _ = jax.lax.scan(lambda x, layer: (model.layer(layer, x), None), x, params["layers"])
        return model.head(params["head"], x, targets)

    def step(params: Any, state: Any, tokens: jax.Array, targets: jax.Array) -> Any:
        def add(sums: Any, microbatch: Any) -> Any:
            found = jax.value_and_grad(loss_sum)(params, *microbatch)
            return jax.tree.map(jnp.add, sums, found), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        sums, _ = jax.lax.scan(add, zeros, (tokens, targets))
        loss, gradients = jax.tree.map(lambda leaf: leaf / targets.size, sums)
        updates, state = optimizer.update(gradients, state, params)
        norm = optax.global_norm(gradients)
        updated: Any = optax.apply_updates(params, updates)
        return loss, tied_copies(model, gradients), norm, tied_copies(model, updated), state

    with jax.default_matmul_precision("highest"):
        tokens, targets = batch_of(sizes, 0)
        return jax.jit(step).lower(whole.params, state, tokens, targets).compile()


def _optimizer(sizes: Sizes) -> optax.GradientTransformation:
    """AdamW by `optimizer_of`, as Optax writes it."""
    told = optimizer_of(sizes)
    rate = told.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
        rate / (told.warmup_steps + 1),
        rate,
        told.warmup_steps,
        told.total_steps,
        rate * told.final_fraction,
    )
    adamw = optax.adamw(
        schedule,
        b1=told.beta1,
        b2=told.beta2,
        eps=told.epsilon,
        weight_decay=told.weight_decay,
        mask=_matrices,
    )
    return optax.chain(optax.clip_by_global_norm(CLIP_NORM), adamw)


def _matrices(params: Params) -> Any:
    """Which parameters decay: not biases and norms; the layers' have one axis more."""
    return {
        part: jax.tree.map(lambda leaf, own=part: leaf.ndim - (own == "layers") >= 2, tree)
        for part, tree in params.items()
    }


def _by_stage(model: PipelineModel, trees: Mapping[str, Params]) -> list[dict[str, np.ndarray]]:
    """Each stage's parts of a whole model's trees, by name; those of a kind begin with it."""
    cut = cut_layers(model.num_layers, NUM_STAGES)
    parts: list[dict[str, np.ndarray]] = [{} for _ in cut]
    for kind, tree in jax.tree.map(np.asarray, dict(trees)).items():
        for own, layers in zip(parts, cut, strict=True):
            own.update(stage_arrays(kind, (_part(tree, layers, cut),)))
    return parts


def _part(tree: Params, layers: range, cut: Sequence[range]) -> Params:
    part = {"layers": jax.tree.map(lambda leaf: leaf[layers.start : layers.stop], tree["layers"])}
    if layers == cut[0]:
        part["embed"] = tree["embed"]
    if layers == cut[-1]:
        part["head"] = tree["head"]
    return part
