"""The optimizer step of one stage: by Optax, clipped by the norm over all stages."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import JaxprEqn

from jaxmorph.errors import UserError
from jaxmorph.stage.compiling import compiled
from jaxmorph.stage.equations import read_variables, trace_flat, walk
from jaxmorph.stage.parameters import LeafPath, with_leaf

Tree = Any
LAYERS = "layers"

# Results of these have their operand's shape, but one number depends on its neighbours.
_MIXES_IN_SHAPE = frozenset(
    {"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "dot_general", "gather", "rev"}
    | {"sort", "transpose"}
)
# Only those whose equations are looked at one by one; calls are left inside branches and loops.
_HOLDS_A_BODY = frozenset(
    {"cond", "while", "scan", "jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"}
)


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with a warm-up and a cosine.

    Attributes:
        learning_rate: The peak, reached after the warm-up.
        total_steps: Steps until the cosine reaches its end.
        final_fraction: The last learning rate as a fraction of the peak.
        weight_decay: Decoupled decay of matrices (not of biases and norms).
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: What keeps Adam's quotient finite.
    """

    learning_rate: float
    warmup_steps: int
    total_steps: int
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8


def learning_rate_schedule(settings: OptimizerSettings) -> optax.Schedule:
    """The learning rate at each step; the first step already moves."""
    peak, warmup = settings.learning_rate, settings.warmup_steps
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=max(settings.total_steps, warmup + 1),
        end_value=peak * settings.final_fraction,
    )


def adamw(settings: OptimizerSettings) -> optax.GradientTransformation:
    """AdamW as the settings have it."""
    return optax.chain(
        optax.scale_by_adam(b1=settings.beta1, b2=settings.beta2, eps=settings.epsilon),
        optax.add_decayed_weights(settings.weight_decay, mask=is_matrix),
        optax.scale_by_learning_rate(learning_rate_schedule(settings)),
    )


def clip_scale(norm: float, clip_norm: float | None) -> float:
    """What gradients are multiplied by so that their global norm is at most `clip_norm`."""
    return 1.0 if clip_norm is None or norm <= clip_norm else clip_norm / norm


class StageOptimizer:
    """The compiled optimizer of one stage; state and parameters stay with the caller.

    Args:
        optimizer: AdamW's settings, or an Optax transformation that updates each number by itself.
        params: The parameters of each of the stage's chunks, float32: a tuple of {"embed",
            "layers", "head"}, layers stacked.
        uncounted: Paths of copies of tied parameters that another copy counts for in the norm.

    Raises:
        UserError: If the transformation reads whole arrays, of which a stage has but a part.
    """

    def __init__(
        self,
        optimizer: OptimizerSettings | optax.GradientTransformation,
        params: Tree,
        uncounted: tuple[LeafPath, ...] = (),
    ) -> None:
        if isinstance(optimizer, OptimizerSettings):
            transformation = adamw(optimizer)
        else:
            transformation = optimizer
            require_elementwise(transformation, params)

        def squared_norm(gradients: Tree) -> jax.Array:
            for path in uncounted:
                gradients = with_leaf(gradients, path, jnp.zeros(()))
            return sum(
                (jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradients)),
                start=jnp.zeros(()),
            )

        def update(params: Tree, state: Tree, gradients: Tree, scale: jax.Array) -> Tree:
            scaled = jax.tree.map(lambda leaf: leaf * scale, gradients)
            updates, state = transformation.update(scaled, state, params)
            return (
                optax.apply_updates(params, updates),
                state,
                jax.tree.map(jnp.zeros_like, gradients),
            )

        state = jax.eval_shape(transformation.init, params)
        scale = jnp.ones((), jnp.float32)
        self._init = jax.jit(transformation.init)
        self._squared_norm = compiled(jax.jit(squared_norm).lower(params))
        updating = jax.jit(update, donate_argnums=(0, 1, 2))
        self._update = compiled(updating.lower(params, state, params, scale))
        self._device = next(iter(jax.tree.leaves(params)[0].devices()))

    def initial_state(self, params: Tree) -> Tree:
        """The state before the first update, the caller's alone."""
        return self._init(params)

    def squared_norm(self, gradients: Tree) -> jax.Array:
        """Sum of squares of the stage's gradients, float32 scalar; tied copies counted once."""
        return self._squared_norm(gradients)

    def update(
        self, params: Tree, state: Tree, gradients: Tree, scale: float
    ) -> tuple[Tree, Tree, Tree]:
        """New parameters, state and zeroed accumulators by scaled gradients; all are donated."""
        if not math.isfinite(scale):
            raise ValueError(f"gradients can't be scaled by {scale}")
        return self._update(
            params, state, gradients, jax.device_put(jnp.float32(scale), self._device)
        )


def is_matrix(params: Tree) -> Tree:
    """Which leaves decay: those of two or more axes, not counting that of stacked layers."""

    def decide(path: tuple[Any, ...], leaf: jax.Array) -> bool:
        stacked = path[1].key == LAYERS  # path[0] is the chunk
        return leaf.ndim - stacked >= 2

    return jax.tree_util.tree_map_with_path(decide, params)


def require_elementwise(transformation: optax.GradientTransformation, params: Any) -> None:
    """Refuse an optimizer whose result would depend on how the model is cut into stages.

    A stage holds some of the parameters alone, with its layers stacked: a norm over all arrays, or
    over one of them, is another on every cut.

    Raises:
        UserError: If an update reads more than the numbers in its own place.
    """
    state = jax.eval_shape(transformation.init, params)
    trace = trace_flat(transformation.update, params, state, params)
    for eqn in walk(trace.equations):
        if _mixes(eqn):
            raise UserError(
                f"optimizer: got one that computes {eqn.primitive.name} over whole arrays, "
                "expected one that updates each number by itself, such as adamw, lion or sgd, as a "
                "stage holds but a part of the parameters (to clip by their global norm, set "
                "optimizer.clip_norm)"
            )


def _mixes(eqn: JaxprEqn) -> bool:
    """Whether an equation brings numbers of different places together, or moves them."""
    if eqn.primitive.name in _HOLDS_A_BODY:
        return False
    shapes = [variable.aval.shape for variable in read_variables(eqn)]  # pyright: ignore[reportAttributeAccessIssue]
    arrays = [shape for shape in shapes if shape]
    if not arrays:
        return False
    results = {variable.aval.shape for variable in eqn.outvars}  # pyright: ignore[reportAttributeAccessIssue]
    return eqn.primitive.name in _MIXES_IN_SHAPE or {*arrays} != results
