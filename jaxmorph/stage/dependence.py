"""Which values of a traced function depend on its arguments, within its calls, loops and branches.

`dependence` follows each argument through a jaxpr, JAX's record of a function. What depends on no
argument is the same in every call: a key that a function makes itself, or the zeros in place of
a gradient that nothing reaches.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Var

from jaxmorph.stage.equations import bodies_of

Within = tuple[JaxprEqn, ...]
"""The equations whose bodies an equation is in, the outermost first."""

See = Callable[[JaxprEqn, Sequence[bool], Within], None]
"""Takes each equation once, with whether its operands depend on an argument."""


def dependence(body: Any, given: Sequence[bool], see: See, within: Within = ()) -> list[bool]:
    """Returns whether each result of a jaxpr depends on an argument.

    Args:
      body: a jaxpr, open or closed.
      given: whether each of the body's inputs depends on an argument.
    """
    jaxpr = getattr(body, "jaxpr", body)
    known = dict(zip(jaxpr.invars, given, strict=True))

    def depends(atom: Any) -> bool:
        return isinstance(atom, Var) and known.get(atom, False)

    for eqn in jaxpr.eqns:
        operands = [depends(atom) for atom in eqn.invars]
        see(eqn, operands, within)
        known |= zip(eqn.outvars, _results(eqn, operands, see, (*within, eqn)), strict=True)
    return [depends(atom) for atom in jaxpr.outvars]


def _results(eqn: JaxprEqn, operands: list[bool], see: See, within: Within) -> list[bool]:
    of_all = [any(operands)] * len(eqn.outvars)
    match eqn.primitive.name:
        case "scan":
            return _of_scan(eqn, operands, see, within)
        case "while":
            return _of_while(eqn, operands, see, within)
        case "cond":
            chosen, *passed = operands
            rows = [dependence(each, passed, see, within) for each in eqn.params["branches"]]
            return [chosen or any(column) for column in zip(*rows, strict=True)]
    results = of_all
    for body in bodies_of(eqn):
        num_inputs = len(getattr(body, "jaxpr", body).invars)
        is_call = num_inputs == len(operands)
        found = dependence(body, operands if is_call else [any(operands)] * num_inputs, see, within)
        results = found if is_call and len(found) == len(of_all) else of_all
    return results


def _of_scan(eqn: JaxprEqn, operands: list[bool], see: See, within: Within) -> list[bool]:
    body = eqn.params["jaxpr"]
    jaxpr = getattr(body, "jaxpr", body)
    # Rows have one more axis outside. (JAX 0.12 no longer has these two numbers as parameters.)
    num_carry = _num_alike(eqn.outvars, jaxpr.outvars)
    num_consts = _num_alike(eqn.invars, jaxpr.invars) - num_carry
    consts, rest = operands[:num_consts], operands[num_consts:]
    carry, rows = rest[:num_carry], rest[num_carry:]

    def step(carry: list[bool], see: See) -> list[bool]:
        return dependence(body, [*consts, *carry, *rows], see, within)

    carry = _settled(carry, lambda carry: step(carry, _nothing)[:num_carry])
    return [*carry, *step(carry, see)[num_carry:]]


def _num_alike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(a.aval.shape == b.aval.shape for a, b in zip(outside, inside, strict=True))


def _of_while(eqn: JaxprEqn, operands: list[bool], see: See, within: Within) -> list[bool]:
    names = ("cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts")
    cond, body, of_cond, of_body = (eqn.params[name] for name in names)
    cond_consts, body_consts = operands[:of_cond], operands[of_cond : of_cond + of_body]

    def step(carry: list[bool], see: See) -> list[bool]:
        # How often the body runs decides all results.
        (goes_on,) = dependence(cond, [*cond_consts, *carry], see, within)
        return [goes_on or each for each in dependence(body, [*body_consts, *carry], see, within)]

    carry = _settled(operands[of_cond + of_body :], lambda carry: step(carry, _nothing))
    step(carry, see)
    return carry


def _settled(carry: list[bool], step: Callable[[list[bool]], list[bool]]) -> list[bool]:
    """What depends on an argument after any number of rounds of a loop."""
    while (after := [a or b for a, b in zip(carry, step(carry), strict=True)]) != carry:
        carry = after
    return carry


def _nothing(eqn: JaxprEqn, operands: Sequence[bool], within: Within) -> None:
    del eqn, operands, within
