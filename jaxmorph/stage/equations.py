"""Traced functions as lists of equations: flattened, measured, and cut into parts that run.

A jaxpr is JAX's own record of a traced function. Here it is made flat (calls are inlined), and a
`Part` is the smallest run of its equations that leads from some known values to some outputs.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntFlag
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


class Origin(IntFlag):
    """The kinds of arguments that a value was computed from; none for a constant."""

    CONSTANT = 0
    PARAMS = 1
    INPUTS = 2
    GRADIENT = 4


@dataclass(frozen=True, eq=False)
class JointTrace:
    """One function's forward and backward as one flat list of equations.

    Attributes:
      trace: from (params, inputs, output gradient) to (output, input gradients, param gradients).
      inputs: one variable per input of the function.
      gradient: the gradient of the output.
      input_gradients: of the inputs that have one, in order.
    """

    trace: FlatTrace
    params: tuple[Var, ...]
    inputs: tuple[Var, ...]
    gradient: Var
    output: Var | Literal
    input_gradients: tuple[Var | Literal, ...]
    param_gradients: tuple[Var | Literal, ...]

    @property
    def gradients(self) -> tuple[Var | Literal, ...]:
        """The gradients of the inputs, then those of the parameters."""
        return (*self.input_gradients, *self.param_gradients)

    @property
    def results(self) -> tuple[Var | Literal, ...]:
        """The output, then the gradients."""
        return (self.output, *self.gradients)

    def needed(
        self, outputs: Iterable[Var | Literal], known: Iterable[Var] = ()
    ) -> tuple[JaxprEqn, ...]:
        """Returns the equations behind these outputs, from the arguments or `known` values on."""
        return needed_equations(self.trace.equations, outputs, set(known))[0]


def origins(joint: JointTrace) -> dict[Var, Origin]:
    """Returns for every variable the kinds of arguments that it depends on."""
    found = dict.fromkeys(joint.trace.constants, Origin.CONSTANT)
    found |= dict.fromkeys(joint.params, Origin.PARAMS)
    found |= dict.fromkeys(joint.inputs, Origin.INPUTS)
    found[joint.gradient] = Origin.GRADIENT
    for eqn in joint.trace.equations:
        origin = Origin.CONSTANT
        for variable in read_variables(eqn):
            origin |= found[variable]
        found |= dict.fromkeys(eqn.outvars, origin)
    return found


def weights_of(joint: JointTrace, origin: dict[Var, Origin]) -> tuple[Var, ...]:
    """Returns the values, computed from the parameters alone, that stand in for them all step.

    Views of a parameter, and values larger than the parameters behind them, are not among them:
    they are computed again where they are used, so the weights never outgrow the parameters.
    """
    own = [eqn for eqn in joint.trace.equations if _origin_of(eqn, origin) == Origin.PARAMS]
    redone = _redone(joint.params, own)
    uses = _uses_of_params(joint, origin)
    return tuple(dict.fromkeys(w for use in uses for w in _anchors(use, redone)))


def _uses_of_params(joint: JointTrace, origin: dict[Var, Origin]) -> Iterator[Var]:
    """Yields the values of the parameters alone that the rest of the computation reads."""
    rest = [eqn for eqn in joint.needed(joint.results) if _origin_of(eqn, origin) > Origin.PARAMS]
    used = [v for eqn in rest for v in read_variables(eqn)]
    used += [atom for atom in joint.results if isinstance(atom, Var)]
    return (v for v in used if origin[v] == Origin.PARAMS)


def _origin_of(eqn: JaxprEqn, origin: dict[Var, Origin]) -> Origin:
    return origin[eqn.outvars[0]]


def _redone(params: Iterable[Var], equations: Sequence[JaxprEqn]) -> dict[Var, list[Var]]:
    """Returns the values to compute again where they are used, each with its operands."""
    behind = {p: frozenset([p]) for p in params}
    redone = {}
    for eqn in equations:
        operands = [v for v in read_variables(eqn) if v in behind]
        sources = frozenset().union(*(behind[v] for v in operands))
        behind |= dict.fromkeys(eqn.outvars, sources)
        if is_view(eqn) or sum(map(elements, eqn.outvars)) > sum(map(elements, sources)):
            redone |= dict.fromkeys(eqn.outvars, operands)
    return redone


def _anchors(variable: Var, redone: dict[Var, list[Var]]) -> Iterator[Var]:
    if variable not in redone:
        yield variable
        return
    for operand in redone[variable]:
        yield from _anchors(operand, redone)


def without_repeats(trace: FlatTrace, params: Iterable[Var]) -> FlatTrace:
    """Returns the trace with what is computed twice from the parameters alone computed once.

    A layer that is computed again in the backward converts its weights again.
    """
    own, first, same, kept = set(params), {}, {}, []
    for original in trace.equations:
        eqn = original.replace(invars=_renamed(original.invars, same))
        if is_cheap(eqn) and own.issuperset(read_variables(eqn)):
            own.update(eqn.outvars)
            earlier = first.setdefault(_fingerprint(eqn), eqn.outvars)
            if earlier is not eqn.outvars:
                same.update(zip(eqn.outvars, earlier, strict=True))
                continue
        kept.append(eqn)
    return replace(trace, equations=tuple(kept), outputs=tuple(_renamed(trace.outputs, same)))


def _renamed(atoms: Iterable[Var | Literal], same: dict[Var, Var]) -> list[Var | Literal]:
    return [same.get(atom, atom) if isinstance(atom, Var) else atom for atom in atoms]


def _fingerprint(eqn: JaxprEqn) -> tuple[Hashable, ...]:
    operands = (repr(atom) if isinstance(atom, Literal) else atom for atom in eqn.invars)
    return (eqn.primitive, repr(eqn.params), *operands)


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
