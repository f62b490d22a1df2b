"""What each equation of a traced backward depends on, and what of it is the weights' own."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntFlag

from jax.extend.core import JaxprEqn, Literal, Var

from jaxmorph.stage.equation_kinds import is_cheap, is_view
from jaxmorph.stage.equations import FlatTrace, elements, needed_equations, read_variables


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
