"""Which equations may be done again, or moved, to hold less memory.

A primitive that is not named here is taken as expensive: it runs once, where it was first needed.
"""

from jax.extend.core import JaxprEqn

_VIEWS = frozenset(
    {
        "broadcast_in_dim",
        "copy",
        "expand_dims",
        "reshape",
        "rev",
        "slice",
        "split",
        "squeeze",
        "stop_gradient",
        "transpose",
    }
)
"""Move or repeat numbers without computing any."""

_ARITHMETIC = frozenset(
    {
        "abs",
        "add",
        "add_any",
        "and",
        "clamp",
        "concatenate",
        "convert_element_type",
        "div",
        "eq",
        "ge",
        "gt",
        "integer_pow",
        "is_finite",
        "le",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "not",
        "one_minus_square",
        "or",
        "pad",
        "select_n",
        "sign",
        "square",
        "sub",
        "xor",
    }
)
"""A few machine instructions per element: no matrix product, reduction or transcendental."""

_REDUCTIONS = frozenset({"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"})


def is_view(eqn: JaxprEqn) -> bool:
    """Returns whether an equation only rearranges or repeats its operand."""
    return eqn.primitive.name in _VIEWS


def is_cheap(eqn: JaxprEqn) -> bool:
    """Returns whether doing an equation a second time costs less than keeping its result."""
    return is_view(eqn) or eqn.primitive.name in _ARITHMETIC


def is_light(eqn: JaxprEqn) -> bool:
    """Returns whether an equation may move from W to B: it is cheap, or reduces."""
    return is_cheap(eqn) or eqn.primitive.name in _REDUCTIONS
