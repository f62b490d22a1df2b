"""Traced functions as lists of equations: flattened, measured, and cut into parts that run.

A jaxpr is JAX's own record of a traced function. Here it is made flat (calls are inlined), and a
`Part` is the smallest run of its equations that leads from some known values to some outputs.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Primitives that only wrap a body, and the parameter that holds it."""


@dataclass(frozen=True, eq=False)
class Part:
    """Equations that compute `outputs` from `inputs`; calling it runs them on arrays."""

    inputs: tuple[Var, ...]
    equations: tuple[JaxprEqn, ...]
    outputs: tuple[Var | Literal, ...]
    constants: Mapping[Var, Any]

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the outputs for these inputs, in order."""
        values = {**self.constants, **dict(zip(self.inputs, arrays, strict=True))}
        return tuple(_evaluate(self.equations, values, self.outputs, inline=False))

    def count(self, primitive: str) -> int:
        """Returns how many equations apply `primitive`, those inside loops and branches too."""
        return sum(eqn.primitive.name == primitive for eqn in walk(self.equations))


@dataclass(frozen=True, eq=False)
class FlatTrace:
    """A traced function without calls.

    Attributes:
      inputs: one variable per leaf of the arguments.
      equations: in the order in which they were traced.
      outputs: one variable or literal per leaf of the result.
      constants: the arrays that the function closed over.
    """

    inputs: tuple[Var, ...]
    equations: tuple[JaxprEqn, ...]
    outputs: tuple[Var | Literal, ...]
    constants: Mapping[Var, Any]

    def part(self, known: Sequence[Var], outputs: Sequence[Var | Literal]) -> Part:
        """Returns the fewest equations that lead from `known` to `outputs`.

        Raises:
          ValueError: an output depends on an input of the trace that is not known.
        """
        equations, missing = needed_equations(self.equations, outputs, {*known, *self.constants})
        if missing:
            raise ValueError(f"outputs depend on values that are not known here: {missing}")
        return Part(tuple(known), equations, tuple(outputs), self.constants)


def trace_flat(function: Callable, *arguments: Any) -> FlatTrace:
    """Returns the equations of `function`, with the bodies of its calls in place of the calls.

    Loops, branches and anything else with a meaning of its own stay single equations.

    Args:
      function: takes and returns pytrees of arrays.
      *arguments: pytrees of arrays or `jax.ShapeDtypeStruct`.
    """
    nested = jax.make_jaxpr(function)(*arguments)

    def inlined(*leaves: jax.Array) -> list[jax.Array]:
        return _evaluate_body(nested, leaves, inline=True)

    flat = jax.make_jaxpr(inlined)(*jax.tree.leaves(arguments))
    constants = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    return FlatTrace(
        tuple(flat.jaxpr.invars), tuple(flat.jaxpr.eqns), tuple(flat.jaxpr.outvars), constants
    )


def needed_equations(
    equations: Sequence[JaxprEqn], outputs: Iterable[Var | Literal], known: set[Var]
) -> tuple[tuple[JaxprEqn, ...], set[Var]]:
    """Returns the equations behind `outputs` from `known` on, and what they lack."""
    wanted = {atom for atom in outputs if isinstance(atom, Var)} - known
    kept = []
    for eqn in reversed(equations):
        if wanted.isdisjoint(eqn.outvars):
            continue
        kept.append(eqn)
        wanted.difference_update(eqn.outvars)
        wanted.update(set(read_variables(eqn)) - known)
    return tuple(reversed(kept)), wanted


def read_variables(eqn: JaxprEqn) -> list[Var]:
    """Returns the variables an equation reads, without its literals."""
    return [atom for atom in eqn.invars if isinstance(atom, Var)]


def size_bytes(variable: Var) -> int:
    """Returns the bytes of a variable's array."""
    return elements(variable) * variable.aval.dtype.itemsize  # pyright: ignore[reportAttributeAccessIssue]


def elements(variable: Var) -> int:
    """Returns the number of elements of a variable's array."""
    return math.prod(variable.aval.shape)  # pyright: ignore[reportAttributeAccessIssue]


def walk(equations: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Yields the equations and, after each, those of the bodies it holds."""
    for eqn in equations:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_body):
            if _is_body(value):
                yield from walk(value.eqns)


def _is_body(value: Any) -> bool:
    return hasattr(value, "eqns")


def _evaluate(
    equations: Iterable[JaxprEqn],
    values: dict[Var, Any],
    outputs: Iterable[Var | Literal],
    inline: bool,
) -> list[Any]:
    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in equations:
        operands = [read(atom) for atom in eqn.invars]
        with eqn.ctx.manager:
            results = _apply(eqn, operands, inline)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in outputs]


def _apply(eqn: JaxprEqn, operands: list[Any], inline: bool) -> Sequence[Any]:
    if inline and eqn.primitive.name in _CALLS:
        return _evaluate_body(eqn.params[_CALLS[eqn.primitive.name]], operands, inline)
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def _evaluate_body(body: Any, operands: Sequence[Any], inline: bool) -> list[Any]:
    # A closed jaxpr brings its constants along; an open one has none of its own.
    jaxpr = getattr(body, "jaxpr", body)
    values = dict(zip(jaxpr.constvars, getattr(body, "consts", ()), strict=True))
    values.update(zip(jaxpr.invars, operands, strict=True))
    return _evaluate(jaxpr.eqns, values, jaxpr.outvars, inline)
