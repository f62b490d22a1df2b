"""The optimizer step of one stage: Optax, clipped by the norm over all stages."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxmorph.errors import UserError
from jaxmorph.runtime.shares import Shares, axes_between
from jaxmorph.stage.compiling import compiled
from jaxmorph.stage.equations import read_variables, trace_flat, walk
from jaxmorph.stage.parameters import LeafPath, with_leaf

Tree = Any
LAYERS = "layers"

# The results of these have their operand's shape, but each number depends on other places.
_MIXES_IN_SHAPE = frozenset(
    {"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "dot_general", "gather", "rev"}
    | {"sort", "transpose"}
)
# `walk` visits the equations inside these one by one.
_HOLDS_A_BODY = frozenset(
    {"cond", "while", "scan", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call"}
)


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with a warm-up and a cosine schedule.

    Attributes:
        learning_rate: The peak, reached after the warm-up.
        total_steps: Steps until the cosine reaches its end.
        final_fraction: The last learning rate as a fraction of the peak.
        weight_decay: Decoupled decay of matrices (not of biases and norms).
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
    """The learning rate at each step; not 0 at the first."""
    peak, warmup = settings.learning_rate, settings.warmup_steps
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=max(settings.total_steps, warmup + 1),
        end_value=peak * settings.final_fraction,
    )


def adamw(settings: OptimizerSettings) -> optax.GradientTransformation:
    """AdamW with these settings."""
    return optax.chain(
        optax.scale_by_adam(b1=settings.beta1, b2=settings.beta2, eps=settings.epsilon),
        optax.add_decayed_weights(settings.weight_decay, mask=is_matrix),
        optax.scale_by_learning_rate(learning_rate_schedule(settings)),
    )


def clip_scale(norm: float, clip_norm: float | None) -> float:
    """The factor that limits the gradients' global norm to `clip_norm`."""
    return 1.0 if clip_norm is None or norm <= clip_norm else clip_norm / norm


class StageOptimizer:
    """The compiled optimizer of one stage; the caller holds state and parameters.

    Args:
        optimizer: AdamW's settings, or an Optax transformation that works number by number.
        params: The parameters of each of the stage's chunks, float32, or their shapes and
            shardings: a tuple of {"embed", "layers", "head"}, layers stacked.
        uncounted: Paths of copies of tied parameters that the norm doesn't count again.
        shares: The part of the parameters that this replica updates; None: all.

    Attributes:
        state_form: The shapes of the state, and where they lie.
        state_axes: With shares: a tree like the state, with the axis along which each array is
            divided (`Shares.axes`).

    Raises:
        UserError: If the transformation reads whole arrays: a stage has only a part of them.
    """

    def __init__(
        self,
        optimizer: OptimizerSettings | optax.GradientTransformation,
        params: Tree,
        uncounted: tuple[LeafPath, ...] = (),
        shares: Shares | None = None,
    ) -> None:
        if isinstance(optimizer, OptimizerSettings):
            transformation = adamw(optimizer)
        else:
            transformation = optimizer
            require_elementwise(transformation, params)
        take = shares.take if shares else lambda tree: tree

        def squared_norm(gradients: Tree) -> jax.Array:
            for path in uncounted:
                gradients = with_leaf(gradients, path, jnp.zeros(()))
            if shares:
                gradients = shares.counted_once(gradients)
            return sum(
                (jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradients)),
                start=jnp.zeros(()),
            )

        def update(params: Tree, state: Tree, gradients: Tree, scale: jax.Array) -> Tree:
            own = take(params)
            scaled = jax.tree.map(lambda leaf: leaf * scale, gradients)
            updates, state = transformation.update(scaled, state, own)
            return (
                optax.apply_updates(own, updates),
                state,
                jax.tree.map(jnp.zeros_like, params),
            )

        of_params = jax.tree.map(lambda leaf: leaf.sharding, params)
        self._alike = _on_all_devices(jax.tree.leaves(of_params)[0])
        own = shares.shapes(params) if shares else params
        state, of_state = _placed_state(transformation, own, of_params, self._alike)
        self.state_form = state
        if shares:
            self.state_axes = axes_between(state, jax.eval_shape(transformation.init, params))
        scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._alike)
        self._init = jax.jit(
            lambda params: transformation.init(take(params)), out_shardings=of_state
        )
        self._squared_norm = compiled(jax.jit(squared_norm).lower(own))
        donated = (1, 2) if shares else (0, 1, 2)  # the parameters are still whole
        updating = jax.jit(
            update, donate_argnums=donated, out_shardings=(of_params, of_state, of_params)
        )
        self._update = compiled(updating.lower(params, state, own, scale))

    def memory_analysis(self) -> Any:
        """The device memory that an update takes, according to XLA."""
        return self._update.memory_analysis()

    def initial_state(self, params: Tree) -> Tree:
        """The state before the first update."""
        return self._init(params)

    def squared_norm(self, gradients: Tree) -> jax.Array:
        """The sum of squares of the stage's gradients, a float32 scalar."""
        return self._squared_norm(gradients)

    def update(
        self, params: Tree, state: Tree, gradients: Tree, scale: float
    ) -> tuple[Tree, Tree, Tree]:
        """New parameters, or this replica's share, new state and zeroed accumulators.

        All arguments are donated, except the parameters where this replica updates only a share.

        Args:
            gradients: Of all parameters, or of this replica's share.
        """
        if not math.isfinite(scale):
            raise ValueError(f"gradients can't be scaled by {scale}")
        return self._update(
            params, state, gradients, jax.device_put(np.float32(scale), self._alike)
        )


def _placed_state(
    transformation: optax.GradientTransformation, params: Tree, of_params: Tree, alike: Sharding
) -> tuple[Tree, Tree]:
    """The state's shapes and shardings; arrays that belong to a parameter lie where it does."""
    structure = jax.tree.structure(params)
    is_like_params = lambda node: jax.tree.structure(node) == structure  # noqa: E731
    state = jax.eval_shape(transformation.init, params)
    of_state = jax.tree.map(
        lambda node: of_params if is_like_params(node) else alike, state, is_leaf=is_like_params
    )
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        of_state,
    )
    return placed, of_state


def _on_all_devices(sharding: Sharding) -> Sharding:
    """The sharding of a number that is the same on all devices of an array."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec())


def is_matrix(params: Tree) -> Tree:
    """Which leaves decay: those of two or more axes, not counting the axis of stacked layers."""

    def decide(path: tuple[Any, ...], leaf: jax.Array) -> bool:
        stacked = path[1].key == LAYERS  # path[0] is the chunk
        return leaf.ndim - stacked >= 2

    return jax.tree_util.tree_map_with_path(decide, params)


def require_elementwise(transformation: optax.GradientTransformation, params: Any) -> None:
    """Refuse an optimizer whose result would depend on how the model is cut into stages.

    A stage holds only some of the parameters, with its layers stacked, so a norm over all arrays or
    over one array differs from cut to cut.

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
                "stage holds only a part of the parameters (to clip by their global norm, set "
                "optimizer.clip_norm)"
            )


def _mixes(eqn: JaxprEqn) -> bool:
    """Whether an equation combines or moves numbers of different places."""
    if eqn.primitive.name in _HOLDS_A_BODY:
        return False
    shapes = [variable.aval.shape for variable in read_variables(eqn)]  # pyright: ignore[reportAttributeAccessIssue]
    arrays = [shape for shape in shapes if shape]
    if not arrays:
        return False
    results = {variable.aval.shape for variable in eqn.outvars}  # pyright: ignore[reportAttributeAccessIssue]
    return eqn.primitive.name in _MIXES_IN_SHAPE or {*arrays} != results
