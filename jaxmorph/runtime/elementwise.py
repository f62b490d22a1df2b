"""Whether an Optax transformation updates each number by itself, whatever else a stage holds."""

from typing import Any

import jax
import optax
from jax.extend.core import JaxprEqn

from jaxmorph.errors import UserError
from jaxmorph.stage.equations import read_variables, trace_flat, walk

# Results of these have their operand's shape, but one number depends on its neighbours.
_MIXES_IN_SHAPE = frozenset(
    {"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "dot_general", "gather", "rev"}
    | {"sort", "transpose"}
)
# Only those whose equations are looked at one by one; calls are left inside branches and loops.
_HOLDS_A_BODY = frozenset(
    {"cond", "while", "scan", "jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"}
)


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
