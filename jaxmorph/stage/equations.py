"""Traced functions as flat lists of equations, and the parts that are cut out of them.

A jaxpr is JAX's record of a traced function. `trace_flat` inlines its calls; a `part` is the fewest
of its equations that lead from some known values to some outputs, and can be run as well.
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
    "remat2": "jaxpr",
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Primitives that only wrap a body, and the parameter that holds it."""


@dataclass(frozen=True, eq=False)
class FlatTrace:
    """A traced function whose calls are inlined; calling it runs it on arrays.

    Attributes:
      inputs: one variable per leaf of the arguments.
      outputs: one variable or literal per leaf of the result.
      constants: the arrays that the function closed over.
    """

    inputs: tuple[Var, ...]
    equations: tuple[JaxprEqn, ...]
    outputs: tuple[Var | Literal, ...]
    constants: Mapping[Var, Any]

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the outputs for these inputs, in order."""
        values = {**self.constants, **dict(zip(self.inputs, arrays, strict=True))}
        return tuple(_evaluate(self.equations, values, self.outputs, inline=False))

    def part(
        self,
        known: Sequence[Var],
        outputs: Sequence[Var | Literal],
        effects: Sequence[JaxprEqn] = (),
    ) -> "FlatTrace":
        """Returns the fewest equations that lead from `known` to `outputs`.

        Args:
          effects: equations that also run, for their effects.

        Raises:
          ValueError: an output depends on an input of the trace that is not in `known`.
        """
        have = {*known, *self.constants}
        equations, missing = needed_equations(self.equations, outputs, have, effects)
        if missing:
            raise ValueError(f"outputs depend on values that are not known here: {missing}")
        return FlatTrace(tuple(known), equations, tuple(outputs), self.constants)

    def temporary_bytes(self) -> int:
        """Estimates the most bytes of results at once, beside the inputs.

        Every equation's result counts as whole; XLA fuses many of them.
        """
        last_read = {v: at for at, eqn in enumerate(self.equations) for v in read_variables(eqn)}
        last_read |= {v: len(self.equations) for v in self.outputs if isinstance(v, Var)}
        held = most = 0
        known = {*self.inputs, *self.constants}
        for at, eqn in enumerate(self.equations):
            held += sum(size_bytes(v) for v in eqn.outvars if v in last_read)
            most = max(most, held)
            read = {v for v in read_variables(eqn) if last_read[v] == at}
            held -= sum(map(size_bytes, read - known))
        return most


def trace_flat(function: Callable, *arguments: Any) -> FlatTrace:
    """Traces `function`, which takes and returns pytrees of arrays, and inlines its calls.

    Loops, branches and custom primitives stay single equations. The arguments may be
    `jax.ShapeDtypeStruct`s.
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
    equations: Sequence[JaxprEqn],
    outputs: Iterable[Var | Literal],
    known: set[Var],
    effects: Sequence[JaxprEqn] = (),
) -> tuple[tuple[JaxprEqn, ...], set[Var]]:
    """Returns the equations between `known` and `outputs`, and the variables that they lack."""
    wanted = {atom for atom in outputs if isinstance(atom, Var)} - known
    run, kept = set(map(id, effects)), []
    for eqn in reversed(equations):
        if wanted.isdisjoint(eqn.outvars) and id(eqn) not in run:
            continue
        kept.append(eqn)
        wanted.difference_update(eqn.outvars)
        wanted.update(set(read_variables(eqn)) - known)
    return tuple(reversed(kept)), wanted


def read_variables(eqn: JaxprEqn) -> list[Var]:
    """Returns the variables that an equation reads, without its literals."""
    return [atom for atom in eqn.invars if isinstance(atom, Var)]


def size_bytes(variable: Var) -> int:
    """Returns the bytes of a variable's array."""
    return elements(variable) * variable.aval.dtype.itemsize  # pyright: ignore[reportAttributeAccessIssue]


def elements(variable: Var) -> int:
    """Returns the number of elements of a variable's array."""
    return math.prod(variable.aval.shape)  # pyright: ignore[reportAttributeAccessIssue]


def walk(equations: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Yields the equations and, after each, those of its loop or branch bodies."""
    for eqn in equations:
        yield eqn
        for body in bodies_of(eqn):
            yield from walk(body.eqns)


def bodies_of(eqn: JaxprEqn) -> Iterator[Any]:
    """Yields the jaxprs that an equation calls, repeats or chooses from."""
    values = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns"))
    return (value for value in values if hasattr(value, "eqns"))


def does_more(eqn: JaxprEqn) -> bool:
    """Whether an equation does something beside its results, such as print.

    JAX counts the name of a collective's axis as an effect, too.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def without_effects(eqn: JaxprEqn) -> JaxprEqn:
    """Returns a loop, branch or other equation without what its bodies do beside their results."""

    def silent(value: Any) -> Any:
        if not hasattr(value, "eqns"):
            return value
        if getattr(value, "jaxpr", value) is not value:  # closed; one class from JAX 0.12 on
            return value.replace(jaxpr=silent(value.jaxpr))
        own = [without_effects(eqn) for eqn in value.eqns if eqn.outvars or not eqn.effects]
        return value.replace(eqns=own, effects=frozenset())

    if not eqn.effects:
        return eqn
    params = jax.tree.map(silent, eqn.params, is_leaf=lambda value: hasattr(value, "eqns"))
    return eqn.replace(params=params, effects=frozenset())


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
    # A closed jaxpr carries its constants; an open one has none.
    jaxpr = getattr(body, "jaxpr", body)
    values = dict(zip(jaxpr.constvars, getattr(body, "consts", ()), strict=True))
    values.update(zip(jaxpr.invars, operands, strict=True))
    return _evaluate(jaxpr.eqns, values, jaxpr.outvars, inline)


class Origin(IntFlag):
    """The kinds of arguments that a value depends on; a constant depends on none."""

    CONSTANT = 0
    PARAMS = 1
    INPUTS = 2
    GRADIENT = 4


@dataclass(frozen=True, eq=False)
class JointTrace:
    """A function's forward and backward as one flat list of equations.

    Attributes:
      trace: from (params, inputs, output gradients) to (outputs, input gradients, param
        gradients).
      extras: those of the inputs that all layers of a stage share.
      effects: the forward's equations that also do something, such as print.
      output_gradients: one for each output.
      input_gradients: one for each input that has a gradient, in order.
    """

    trace: FlatTrace
    params: tuple[Var, ...]
    inputs: tuple[Var, ...]
    extras: tuple[Var, ...]
    output_gradients: tuple[Var, ...]
    outputs: tuple[Var | Literal, ...]
    input_gradients: tuple[Var | Literal, ...]
    param_gradients: tuple[Var | Literal, ...]
    effects: tuple[JaxprEqn, ...]

    @property
    def gradients(self) -> tuple[Var | Literal, ...]:
        """Those of the inputs, then those of the parameters."""
        return (*self.input_gradients, *self.param_gradients)

    @property
    def results(self) -> tuple[Var | Literal, ...]:
        """The outputs, then the gradients."""
        return (*self.outputs, *self.gradients)

    def needed(
        self, outputs: Iterable[Var | Literal], known: Iterable[Var] = ()
    ) -> tuple[JaxprEqn, ...]:
        """Returns the equations that lead from the arguments, or `known` values, to the outputs."""
        return needed_equations(self.trace.equations, outputs, set(known))[0]


def origins(joint: JointTrace) -> dict[Var, Origin]:
    """Returns the kinds of arguments that each variable depends on."""
    found = dict.fromkeys(joint.trace.constants, Origin.CONSTANT)
    found |= dict.fromkeys(joint.params, Origin.PARAMS)
    found |= dict.fromkeys(joint.inputs, Origin.INPUTS)
    found |= dict.fromkeys(joint.output_gradients, Origin.GRADIENT)
    for eqn in joint.trace.equations:
        found |= dict.fromkeys(eqn.outvars, _origin_of(eqn, found))
    return found


def weights_of(joint: JointTrace, origin: dict[Var, Origin]) -> tuple[Var, ...]:
    """Returns the values that take the parameters' place in all ops of a step.

    They depend on the parameters alone, such as a matrix converted to bfloat16. Views are
    recomputed where they are used, and so are values larger than the parameters that they come
    from: no single weight takes more than its parameters.
    """
    own = [eqn for eqn in joint.trace.equations if _origin_of(eqn, origin) == Origin.PARAMS]
    kept = _kept_for(joint.params, own)
    return tuple(dict.fromkeys(w for use in _uses_of_params(joint, origin) for w in kept[use]))


def _uses_of_params(joint: JointTrace, origin: dict[Var, Origin]) -> Iterator[Var]:
    """Yields the values that depend on the parameters alone and that other equations read."""
    rest = [eqn for eqn in joint.needed(joint.results) if _origin_of(eqn, origin) > Origin.PARAMS]
    used = [v for eqn in (*rest, *joint.effects) for v in read_variables(eqn)]
    used += [atom for atom in joint.results if isinstance(atom, Var)]
    return (v for v in used if origin[v] == Origin.PARAMS)


def _origin_of(eqn: JaxprEqn, origin: dict[Var, Origin]) -> Origin:
    found = Origin.CONSTANT
    for variable in read_variables(eqn):
        found |= origin[variable]
    return found


def _kept_for(params: Iterable[Var], equations: Sequence[JaxprEqn]) -> dict[Var, tuple[Var, ...]]:
    """Returns what to keep for each value: itself, or what it is recomputed from."""
    kept = {p: (p,) for p in params}
    params_of: dict[Var, frozenset[Var]] = {p: frozenset([p]) for p in kept}
    for eqn in equations:
        operands = [v for v in read_variables(eqn) if v in kept]
        sources = frozenset().union(*(params_of[v] for v in operands))
        params_of |= dict.fromkeys(eqn.outvars, sources)
        again = is_view(eqn) or sum(map(elements, eqn.outvars)) > sum(map(elements, sources))
        below = tuple(dict.fromkeys(w for v in operands for w in kept[v]))
        kept |= {out: below if again else (out,) for out in eqn.outvars}
    return kept


def without_repeats(trace: FlatTrace, params: Iterable[Var]) -> FlatTrace:
    """Returns the trace with repeated equations of the parameters alone merged into one.

    With `jax.checkpoint`, the backward computes a layer again and converts its weights again.
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
    results = (str(variable.aval) for variable in eqn.outvars)  # a literal's text has no dtype
    return (eqn.primitive, repr(eqn.params), *operands, *results)


_VIEWS = frozenset(
    {
        "broadcast_in_dim",
        "copy",
        "reshape",
        "rev",
        "slice",
        "split",
        "squeeze",
        "stop_gradient",
        "transpose",
    }
)
"""Primitives that move or repeat numbers without computing any."""

_ARITHMETIC = frozenset(
    {
        "abs",
        "add",
        "add_any",
        "and",
        "bitcast_convert_type",
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
"""Primitives of a few machine instructions per element: no product, reduction, transcendental."""

_OF_KEYS = frozenset(
    {"random_clone", "random_fold_in", "random_split", "random_unwrap", "random_wrap"}
)
"""Primitives that make a few numbers for keys, but no array of random ones."""

_REDUCTIONS = frozenset({"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"})


def is_view(eqn: JaxprEqn) -> bool:
    """Whether an equation only rearranges or repeats its operand."""
    return eqn.primitive.name in _VIEWS


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether running an equation twice costs less than keeping its result."""
    return is_view(eqn) or eqn.primitive.name in _ARITHMETIC | _OF_KEYS


def is_light(eqn: JaxprEqn) -> bool:
    """Whether an equation may move from W to B: it is cheap, or a reduction."""
    return is_cheap(eqn) or eqn.primitive.name in _REDUCTIONS
