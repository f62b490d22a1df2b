"""A model's function as a step calls it, traced, and what its equations and its gradient say.

Random numbers must follow from an argument, else they are the same in every step. Only effects of
`jax.debug` can be kept, since programs run in the order of the schedule, may run again, and are
kept on disk. Errors name the user's line.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jaxmorph.errors import UserError, definition_of, in_users_code, users_line
from jaxmorph.stage.dependence import Within, dependence
from jaxmorph.stage.equations import FlatTrace, bodies_of, without_effects
from jaxmorph.stage.model import Params, Path, Tree, takes_extras, takes_key

Reached = tuple[dict[Path, bool], bool]
"""Whether a function's gradient reaches each parameter, and its activations."""


@dataclass(frozen=True, eq=False)
class ModelCall:
    """A function of the model, and what it is passed in a step, as shapes or arrays.

    Attributes:
      x: (activations,), of a function that takes some.
      data: what has no gradient.
    """

    name: str
    function: Callable[..., Any]
    params: Params
    x: tuple[Tree, ...]
    data: tuple[Tree, ...]
    extras: Mapping[str, Tree] = field(default_factory=dict)

    @property
    def by_name(self) -> dict[str, Any]:
        """The key and the extras, if the function names them."""
        named: dict[str, Any] = {}
        if takes_key(self.function):
            named["key"] = jax.eval_shape(jax.random.key, 0)
        if takes_extras(self.function):
            named["extras"] = dict(self.extras)
        return named

    def checked(self, check: Callable[["ModelCall", Any], None]) -> Tree:
        """Traces the function with a key and without, checks both; returns the result's shapes."""
        jaxpr, result = self._traced(self.name, self.by_name)
        check(self, result)
        self._check_equations(jaxpr)
        if takes_key(self.function):
            doing = f"{self.name} with key=None, as in evaluations"
            _, without = self._traced(doing, self.by_name | {"key": None})
            if not is_same(without, result):
                got, expected = described(without), described(result)
                raise self.wrong(f"got {got}, expected {expected} as with a key", doing)
        return result

    def wrong(self, text: str, doing: str = "", line: str = "") -> UserError:
        """The error for a wrong result: where, and what."""
        place = line or definition_of(self.function) or "model"
        return UserError(f"{place}: {doing or self.name}: {text}")

    def reached(self, result: Tree) -> Reached:
        """Returns what the gradient of a result of this structure reaches."""

        def floats_of(tree: Tree) -> list[Any]:
            return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]

        def pulled(of: Any, data: Tree, by_name: Mapping[str, Any], gradient: Any) -> list[Any]:
            def floats(of: Any) -> list[Any]:
                params, x = of
                return floats_of(self.function(params, *x, *data, **by_name))

            (gradients,) = jax.vjp(floats, of)[1](gradient)
            return floats_of(gradients)  # integers have none

        arguments = (self.params, self.x), self.data, self.by_name, floats_of(result)
        with in_users_code(f"the gradient of {self.name}", self.function):
            jaxpr = jax.make_jaxpr(pulled)(*arguments)
        depends = iter(dependence(jaxpr, [True] * len(jaxpr.in_avals), lambda *_: None))
        paths = [path for path, _ in jax.tree.leaves_with_path(self.params)]
        of_params = {tuple(key.key for key in path): next(depends) for path in paths}
        return of_params, any(depends)

    def _traced(self, doing: str, by_name: Mapping[str, Any]) -> tuple[Any, Tree]:
        def call(params: Params, inputs: tuple[Tree, ...], by_name: Mapping[str, Any]) -> Tree:
            return self.function(params, *inputs, **by_name)

        arguments = (self.params, (*self.x, *self.data), dict(by_name))
        with in_users_code(doing, self.function):
            try:
                return jax.make_jaxpr(call, return_shape=True)(*arguments)
            except KeyError as error:
                raise self._no_such_key(error, doing) from error

    def _no_such_key(self, error: KeyError, doing: str) -> UserError:
        text = f"KeyError: {error}: its parameters are {listed(self.params)}"
        if takes_extras(self.function):
            text += f"; the data's extras are {listed(self.extras)}"
        return self.wrong(text, doing, users_line(error.__traceback__))

    def _check_equations(self, jaxpr: Any) -> None:
        """Checks that random numbers follow from an argument, and that all effects can be kept."""
        lost = [each for each in jaxpr.effects if each not in _kept_effects()]

        def see(eqn: JaxprEqn, operands: Sequence[bool], within: Within) -> None:
            name = eqn.primitive.name
            if name in _RANDOM and not any(operands[: _RANDOM[name]]):
                raise self.wrong(
                    "got random numbers whose key follows from no argument: the same in every step "
                    "and microbatch, expected numbers made from its argument `key`, or a constant "
                    "that `build` makes",
                    line=_line_of(eqn, within),
                )
            if not any(True for _ in bodies_of(eqn)) and not eqn.effects.isdisjoint(lost):
                is_ordered = eqn.params.get("ordered") and name.startswith("debug")
                got = f"{name} with ordered=True" if is_ordered else name
                raise self.wrong(
                    f"got {got}, expected no effect but jax.debug.print and jax.debug.callback "
                    "without an order: the schedule orders microbatches, and the data is read "
                    "outside the model",
                    line=_line_of(eqn, within),
                )

        dependence(jaxpr, [True] * len(jaxpr.in_avals), see)
        if lost:
            raise self.wrong(f"got the effect {lost[0]}, expected none")


_RANDOM = {
    "random_bits": 1,
    "random_gamma": 1,
    "rng_bit_generator": 1,
    "rng_uniform": 0,
    "threefry2x32": 2,
}
"""The primitives that draw numbers, and how many operands are their key."""


def run_for_check(trace: FlatTrace, *leaves: Any) -> Any:
    """Runs a traced function once and returns its results on the host, in order.

    It prints nothing, because a user would take the output for a step's. It is compiled without
    XLA's optimizations, which takes half the time on a CPU.
    """
    equations = tuple(map(without_effects, trace.equations))
    quiet = replace(trace, equations=equations).part(trace.inputs, trace.outputs)
    program = jax.jit(quiet).lower(*leaves).compile({"xla_backend_optimization_level": "0"})
    return jax.device_get(program(*leaves))


def _kept_effects() -> Any:
    """The effects of jax.debug.print without an order, which works in every function."""
    return jax.make_jaxpr(lambda: jax.debug.print(""))().effects


def _line_of(eqn: JaxprEqn, within: Within) -> str:
    """The user's line of an equation."""
    line = ""
    for each in (*within, eqn):
        trace = each.source_info.traceback
        line = (trace and users_line(trace.as_python_traceback())) or line
        if each.primitive.name == "jit":
            break  # JAX caches its body, which other lines may have made
    return line


def is_float(leaf: Any) -> bool:
    """Whether an array has a gradient."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def is_same(got: Tree, expected: Tree) -> bool:
    """Whether two trees have one structure, and arrays of the same shapes and dtypes."""
    if jax.tree.structure(got) != jax.tree.structure(expected):
        return False
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)


def described(tree: Tree) -> str:
    """The dtypes and shapes of a tree's arrays."""
    if isinstance(tree, jax.ShapeDtypeStruct):
        return f"{tree.dtype}{list(tree.shape)}"
    leaves = jax.tree.leaves_with_path(tree)
    inner = [f"{jax.tree_util.keystr(path)} {described(leaf)}" for path, leaf in leaves]
    return f"{type(tree).__name__} of {', '.join(inner)}" if inner else f"{tree!r}"


def listed(names: Iterable[str]) -> str:
    """Names in a sentence."""
    return ", ".join(map(str, names)) or "none"


def made_up(random: np.random.Generator, shapes: Tree) -> Tree:
    """Arrays for one example: normal floats, the integers 0 and 1, and true bools."""

    def make(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        shape = (1, *leaf.shape[1:])
        if is_float(leaf):
            return random.standard_normal(shape).astype(leaf.dtype)
        is_bool = leaf.dtype == jnp.bool_
        return (np.ones(shape) if is_bool else random.integers(2, size=shape)).astype(leaf.dtype)

    return jax.tree.map(make, shapes)
