"""Splits a backward into B, the gradient of the input, and W, the gradient of the weights.

The split of a backward into B and W is that of zero-bubble pipelines (Qi et al., ICLR 2024; section
2 of the PipeMorph paper). Here it is automatic for any function: forward and backward are traced as
one list of equations, and two minimum cuts choose what F hands to the backward (the stash) and what
B hands to W (the weight stash). Each part then runs the fewest equations between its cuts.

The cuts are those of min-cut rematerialisation in compilers, except that matrix products,
reductions and transcendentals never run twice.
"""

import re
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from jaxmorph.stage.equations import (
    FlatTrace,
    JointTrace,
    Origin,
    does_more,
    is_cheap,
    is_light,
    origins,
    read_variables,
    size_bytes,
    trace_flat,
    weights_of,
    without_effects,
    without_repeats,
)
from jaxmorph.stage.model import takes_extras, takes_key

_PRICE_OF_A_BYTE = 1024
"""A repeated equation or an additional array costs 1, so it only decides between equal sizes."""

_PRICE_OF_A_KEY = 2**40


@dataclass(frozen=True, eq=False)
class SplitBackward:
    """A function as the parts that F, B, W and BW run, on flat sequences of arrays.

    Attributes:
      prepare: params -> prepared; runs once a step.
      weight_sources: position of each weight in (*params, *prepared).
      forward: (*weights, *inputs, *extras, *key) -> (*outputs, *stash).
      backward_input: (*weights, *stash, *output gradients) -> (*input gradients, *new).
      backward_weight: (*weights, *passed on, *new) -> param gradients.
      backward: (*weights, *stash, *output gradients) -> (*input gradients, *param gradients).
      passed_on: positions in the stash of the arrays that W needs too.
      num_outputs: number of the function's results.
      num_input_gradients: number of inputs that have a gradient.
      reads_key: whether the function reads its key; else no part takes one.
      differs_without_key: whether it computes something else where `key` is None.
      extras: the extras' leaves that the function reads, by number; no part takes the others.
      shared: the extras' leaves that the stash begins with, by number.
    """

    prepare: FlatTrace
    weight_sources: tuple[int, ...]
    forward: FlatTrace
    backward_input: FlatTrace
    backward_weight: FlatTrace
    backward: FlatTrace
    passed_on: tuple[int, ...]
    num_outputs: int
    num_input_gradients: int
    reads_key: bool
    differs_without_key: bool
    extras: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def num_weights(self) -> int:
        """Number of arrays that F, B and W take in place of the parameters."""
        return len(self.weight_sources)

    @property
    def num_stash(self) -> int:
        """Number of arrays that F keeps for the backward."""
        return len(self.forward.outputs) - self.num_outputs

    @property
    def num_shared_in_weight_stash(self) -> int:
        """Number of extras that the weight stash begins with."""
        return sum(at < len(self.shared) for at in self.passed_on)

    @property
    def num_new(self) -> int:
        """Number of arrays that B adds for W."""
        return len(self.backward_input.outputs) - self.num_input_gradients


def split_backward(
    function: Callable,
    params: Any,
    *inputs: Any,
    data: Sequence[Any] = (),
    extras: Mapping[str, Any] | None = None,
    recompute: bool = False,
) -> SplitBackward:
    """Splits a function and its backward; nothing in the stash depends on the parameters alone.

    Args:
      function: pure; takes params, the inputs and the data, returns an array or a tree of arrays.
        If it names `key` and reads it, the key is a further input, in raw form.
      params: a pytree of floating-point arrays or `jax.ShapeDtypeStruct`.
      *inputs: arrays or `jax.ShapeDtypeStruct`; integer inputs have no gradient.
      data: further inputs, without gradients: trees of arrays, whose leaves the parts take.
      extras: what a function that names `extras` is passed, also without gradients.
      recompute: whether to keep only the inputs, and compute the rest again.
    """
    flat = _Flat.of(function, len(inputs), data, extras or {})
    joint = _trace_joint(flat, params, inputs, recompute=recompute)
    read = _read_by(joint)
    reads_key = flat.takes_key and joint.inputs[-1] in read
    read_extras = [v for v in joint.extras if v in read]
    num_before = len(joint.inputs) - flat.takes_key - len(joint.extras)
    key = joint.inputs[-1:] if reads_key else ()
    part_inputs = [*joint.inputs[:num_before], *read_extras, *key]
    origin = origins(joint)
    weights = weights_of(joint, origin)
    stash = _cut_after_forward(joint, origin)
    stash.sort(key=lambda value: value not in joint.extras)
    weight_stash = _cut_before_weights(joint, origin, stash)
    new = [v for v in weight_stash if v not in stash]
    passed_on = [v for v in stash if v in weight_stash]
    prepared = [v for v in weights if v not in joint.params]
    part, input_gradients = joint.trace.part, joint.input_gradients
    pool = [*joint.params, *prepared]
    return SplitBackward(
        prepare=part(joint.params, prepared),
        weight_sources=tuple(pool.index(w) for w in weights),
        forward=part([*weights, *part_inputs], [*joint.outputs, *stash], joint.effects),
        backward_input=part([*weights, *stash, *joint.output_gradients], [*input_gradients, *new]),
        backward_weight=part([*weights, *passed_on, *new], joint.param_gradients),
        backward=part(
            [*weights, *stash, *joint.output_gradients],
            [*input_gradients, *joint.param_gradients],
        ),
        passed_on=tuple(stash.index(v) for v in passed_on),
        num_outputs=len(joint.outputs),
        num_input_gradients=len(input_gradients),
        reads_key=reads_key,
        differs_without_key=reads_key or (flat.takes_key and _asks_for_key(flat, params, inputs)),
        extras=tuple(joint.extras.index(v) for v in read_extras),
        shared=tuple(joint.extras.index(v) for v in stash if v in joint.extras),
    )


@dataclass(frozen=True, eq=False)
class _Flat:
    """A model's function of (params, *inputs, *leaves of data and extras, *raw key)."""

    function: Callable
    num_inputs: int
    structure: Any
    leaves: tuple[Any, ...]
    num_extras: int
    takes_key: bool
    takes_extras: bool

    @classmethod
    def of(
        cls, function: Callable, num_inputs: int, data: Sequence[Any], extras: Mapping[str, Any]
    ) -> "_Flat":
        with_key, with_extras = takes_key(function), takes_extras(function)
        extras = extras if with_extras else {}
        leaves, structure = jax.tree.flatten((data, extras))
        if with_key:  # as numbers, the form in which keys enter and leave programs
            leaves.append(jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))))
        num_extras = len(jax.tree.leaves(extras))
        return cls(
            function, num_inputs, structure, tuple(leaves), num_extras, with_key, with_extras
        )

    def __call__(self, params: Any, *arrays: Any) -> Any:
        inputs, leaves = arrays[: self.num_inputs], list(arrays[self.num_inputs :])
        by_name = {}
        if self.takes_key:
            by_name["key"] = jax.random.wrap_key_data(leaves.pop())
        data, extras = self.structure.unflatten(leaves)
        if self.takes_extras:
            by_name["extras"] = extras
        return self.function(params, *inputs, *data, **by_name)


def _asks_for_key(flat: _Flat, params: Any, inputs: Sequence[Any]) -> bool:
    """Whether a function that reads no numbers from its key still depends on having one."""
    *leaves, key = flat.leaves
    arguments = (params, *inputs, *leaves)

    def computed(function: Callable, *key: Any) -> tuple[str, list[bytes]]:
        trace = trace_flat(function, *arguments, *key)
        effects = [eqn for eqn in trace.equations if does_more(eqn)]
        own = trace.inputs[: len(trace.inputs) - len(key)]
        part = trace.part(own, trace.outputs, effects)
        jaxpr = jax.make_jaxpr(part)(*jax.tree.leaves(arguments))
        # The text names variables in order, but functions by their addresses.
        return re.sub("0x[0-9a-f]+", "", str(jaxpr)), [_bits(each) for each in jaxpr.consts]

    without = replace(flat, function=partial(flat.function, key=None), takes_key=False)
    return computed(flat, key) != computed(without)


def _bits(constant: Any) -> bytes:
    is_key = jnp.issubdtype(constant.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(constant) if is_key else constant).tobytes()


def _read_by(joint: JointTrace) -> set[Var]:
    """The values that the function, its effects or its gradients need."""
    equations = (*joint.needed(joint.results), *joint.effects)
    read = {v for eqn in equations for v in read_variables(eqn)}
    return read.union(atom for atom in joint.results if isinstance(atom, Var))


def _trace_joint(flat: _Flat, params: Any, inputs: Sequence[Any], *, recompute: bool) -> JointTrace:
    function = jax.checkpoint(flat) if recompute else flat
    has_gradient = [jnp.issubdtype(x.dtype, jnp.inexact) for x in inputs]
    has_gradient += [False] * len(flat.leaves)
    inputs = (*inputs, *flat.leaves)

    def joint(params: Any, inputs: Sequence[Any], gradient: Any) -> Any:
        def of_floats(params: Any, floats: list[jax.Array]) -> Any:
            rest = iter(floats)
            merged = [next(rest) if g else x for g, x in zip(has_gradient, inputs, strict=True)]
            return function(params, *merged)

        floats = [x for g, x in zip(has_gradient, inputs, strict=True) if g]
        output, pullback = jax.vjp(of_floats, params, floats)
        param_gradients, input_gradients = pullback(gradient)
        return output, input_gradients, jax.tree.leaves(param_gradients)

    output = jax.eval_shape(function, params, *inputs)
    num_outputs = len(jax.tree.leaves(output))
    num_params, num_gradients = len(jax.tree.leaves(params)), sum(has_gradient)
    trace = trace_flat(joint, params, tuple(inputs), output)
    trace = without_repeats(trace, trace.inputs[:num_params])
    trace, effects = _run_once(trace, flat, (params, *inputs))
    flat_inputs = trace.inputs[num_params:-num_outputs]
    extras_end = len(flat_inputs) - flat.takes_key
    return JointTrace(
        trace,
        params=trace.inputs[:num_params],
        inputs=flat_inputs,
        extras=flat_inputs[extras_end - flat.num_extras : extras_end],
        output_gradients=trace.inputs[-num_outputs:],
        outputs=trace.outputs[:num_outputs],
        input_gradients=trace.outputs[num_outputs : num_outputs + num_gradients],
        param_gradients=trace.outputs[num_outputs + num_gradients :],
        effects=effects,
    )


def _run_once(
    joint: FlatTrace, flat: _Flat, arguments: Sequence[Any]
) -> tuple[FlatTrace, tuple[JaxprEqn, ...]]:
    """Keeps effects, such as a print, only in the forward, whose equations come first."""
    effects = [eqn for eqn in joint.equations if does_more(eqn)]
    if not effects:
        return joint, ()
    num_own = sum(map(does_more, trace_flat(flat, *arguments).equations))
    own = set(map(id, effects[:num_own]))
    equations = [eqn if id(eqn) in own else without_effects(eqn) for eqn in joint.equations]
    return replace(joint, equations=tuple(equations)), tuple(effects[:num_own])


_UNLIMITED = float("inf")


class ValueGraph:
    """Finds the cheapest values to keep between the halves of a computation: a minimum vertex cut.

    Each value has a price; some are made in the early half, some are used in the late one.
    `cheapest_cut` picks the values to keep so that the late half can compute all it uses. It is a
    maximum flow (Edmonds and Karp, 1972) on a graph in which each value is two nodes, joined by an
    edge whose capacity is the price.
    """

    def __init__(self):
        self._values: dict[Any, None] = {}
        self._residual: dict[Any, dict[Any, float]] = defaultdict(dict)

    def add(self, value: Hashable, price: float) -> None:
        """Adds a value that costs `price` to keep."""
        self._values[value] = None
        self._connect(("in", value), ("out", value), price)

    def made_early(self, value: Hashable, otherwise: float = _UNLIMITED) -> None:
        """Makes `value` in the early half; `otherwise` is the cost of making it late instead."""
        self._connect("early", ("in", value), otherwise)

    def made_late(self, value: Hashable, otherwise: float) -> None:
        """Makes `value` in the late half; `otherwise` is the cost of making it early instead."""
        self._connect(("in", value), "late", otherwise)

    def used_late(self, *values: Hashable) -> None:
        """Declares that the late half uses the values."""
        for value in values:
            self._connect(("out", value), "late", _UNLIMITED)

    def depends(self, value: Hashable, *operands: Hashable) -> None:
        """Declares that making `value` late needs `operands`, made late as well or kept."""
        for operand in operands:
            self._connect(("out", operand), ("in", value), _UNLIMITED)

    def together(self, first: Hashable, second: Hashable) -> None:
        """Makes both values in the same half."""
        self._connect(("in", first), ("in", second), _UNLIMITED)
        self._connect(("in", second), ("in", first), _UNLIMITED)

    def cheapest_cut(self) -> list[Any]:
        """Returns the values to keep, in the order in which they were added."""
        while "late" in (came_from := self._search()):
            self._augment(came_from)
        early = came_from
        return [v for v in self._values if ("in", v) in early and ("out", v) not in early]

    def _connect(self, tail: Any, head: Any, capacity: float) -> None:
        self._residual[tail][head] = self._residual[tail].get(head, 0) + capacity
        self._residual[head].setdefault(tail, 0)

    def _search(self) -> dict[Any, Any]:
        """Returns each node reachable from `early` over free capacity, with its predecessor."""
        came_from: dict[Any, Any] = {"early": None}
        queue = deque[Any](["early"])
        while queue:
            tail = queue.popleft()
            for head, capacity in self._residual[tail].items():
                if capacity > 0 and head not in came_from:
                    came_from[head] = tail
                    queue.append(head)
        return came_from

    def _augment(self, came_from: dict[Any, Any]) -> None:
        path: list[Any] = ["late"]
        while path[-1] != "early":
            path.append(came_from[path[-1]])
        edges = list(zip(path[1:], path, strict=False))
        flow = min(self._residual[tail][head] for tail, head in edges)
        if flow == _UNLIMITED:
            raise ValueError("a value made early and used late has no price")
        for tail, head in edges:
            self._residual[tail][head] -= flow
            self._residual[head][tail] += flow


def _cut_after_forward(joint: JointTrace, origin: dict[Var, Origin]) -> list[Var]:
    """Returns the stash: the fewest bytes of the forward from which the backward can continue.

    What F computes for the output stays in F, but the backward may repeat cheap equations. What
    only the backward uses may run on either side if it needs no output gradient.
    """
    of_output = set(map(id, joint.needed(joint.outputs)))
    graph, known = ValueGraph(), set(joint.inputs)
    for value in joint.inputs:
        graph.add(value, _price_on_stage(value, joint))
        graph.made_early(value)
    for eqn in joint.needed(joint.results):
        operands = [v for v in read_variables(eqn) if v in known]
        if origin[eqn.outvars[0]] & Origin.GRADIENT:
            graph.used_late(*operands)
        elif operands:
            known.update(eqn.outvars)
            _place_around_forward(graph, eqn, operands, of_output=id(eqn) in of_output)
    graph.used_late(*(v for v in joint.gradients if v in known))
    return graph.cheapest_cut()


def _place_around_forward(
    graph: ValueGraph, eqn: JaxprEqn, operands: Sequence[Var], of_output: bool
) -> None:
    for value in eqn.outvars:
        graph.add(value, _price(value))
        graph.depends(value, *operands)
        if not of_output:
            graph.made_late(value, otherwise=1)
            graph.together(eqn.outvars[0], value)
        elif is_cheap(eqn):
            graph.made_early(value, otherwise=1)
        else:
            graph.made_early(value)


def _cut_before_weights(
    joint: JointTrace, origin: dict[Var, Origin], stash: Sequence[Var]
) -> list[Var]:
    """Returns the weight stash: the fewest bytes of F and B from which W can continue.

    B runs what the input's gradient needs; W may repeat B's cheap equations that depend on no
    output gradient. Equations that only W needs run in W, except light ones that leave less to keep
    when they run in B: the gradient of a norm's scale is one row, its operands are whole arrays.
    """
    of_input = set(map(id, joint.needed(joint.input_gradients, stash)))
    graph, given, late = ValueGraph(), (*stash, *joint.output_gradients), set()
    known = set(given)
    for value in given:  # in order, so that all processes have the same programs
        # Of two equal sizes, keep the one that the stash holds already: it needs no new array.
        graph.add(value, _price_on_stage(value, joint) + (value not in stash))
        graph.made_early(value)
    for eqn in joint.needed(joint.results, stash):
        operands = [v for v in read_variables(eqn) if v in known]
        in_b = id(eqn) in of_input
        if not in_b and (not is_light(eqn) or not late.isdisjoint(read_variables(eqn))):
            late.update(eqn.outvars)
            graph.used_late(*operands)
        elif operands:
            known.update(eqn.outvars)
            again = is_cheap(eqn) and not origin[eqn.outvars[0]] & Origin.GRADIENT
            _place_around_backward(graph, eqn, operands, only_early=in_b and not again)
    graph.used_late(*(v for v in joint.param_gradients if v in known))
    return graph.cheapest_cut()


def _place_around_backward(
    graph: ValueGraph, eqn: JaxprEqn, operands: Sequence[Var], only_early: bool
) -> None:
    for value in eqn.outvars:
        graph.add(value, _price(value) + 1)
        graph.depends(value, *operands)
        if only_early:
            graph.made_early(value)


def _price_on_stage(value: Var, joint: JointTrace) -> int:
    # A stage keeps a leaf of the extras once, whatever the number of its layers.
    return 1 if value in joint.extras else _price(value)


def _price(value: Var) -> int:
    # Keys are made again from their raw form instead: few things can be done to arrays of them.
    times = _PRICE_OF_A_KEY if jnp.issubdtype(value.aval.dtype, jax.dtypes.prng_key) else 1  # pyright: ignore[reportAttributeAccessIssue]
    return size_bytes(value) * _PRICE_OF_A_BYTE * times
