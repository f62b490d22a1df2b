"""How far two stages' training is from that of one device."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmorph.gpu_check.one_device import PlainTraining
from jaxmorph.gpu_check.report import Row
from jaxmorph.gpu_check.stage_processes import StageResult
from jaxmorph.gpu_check.stage_training import GRADIENT, PARAMETER

SCALAR_TOLERANCE = 1e-5
"""Of the losses and norms. Sums of float32 in another order differ by about 1e-6."""

GRADIENT_TOLERANCE = 1e-4
"""Of each of the first step's gradients, whose parameters are the same: as in the part `parity`."""

PARAMETER_TOLERANCE = 1e-3
"""Of how far a parameter has moved in all steps. Noise as of rounding, 1e-6, leaves 5e-5 (see
`optimizer_of`), and as of products in TF32, 1e-3, leaves 1e-2 and more; a gradient that isn't
added, or comes from another microbatch, 1e-1 and more."""

_ROUNDING = float(np.finfo(np.float32).eps)
"""How far two float32 numbers, rounded in each of two ways, can drift apart in a step."""


@dataclass(frozen=True)
class TrainingDifference:
    """How far two stages' training is from that of one device.

    Attributes:
        losses: For each step, how far its loss is off, relatively.
        norms: The same of the gradients' norms.
        gradients: For each stage, how far each gradient of the first step is off, at most, as a
            share of its largest element.
        parameters: For each stage, how far each parameter is off after the last step: the norm of
            that, as a share of the norm of how far it has moved. For a parameter that moves by
            little of itself that is made larger, so that what rounding may do is tolerated.
    """

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, float]]
    parameters: list[dict[str, float]]

    def rows(self) -> Iterator[Row]:
        """A row for each kind of figure, of the worst of them."""
        steps = f"the worst of {len(self.losses)} steps"
        yield _row("loss", self.losses, SCALAR_TOLERANCE, steps)
        yield _row("gradients' norm", self.norms, SCALAR_TOLERANCE, steps)
        name, worst = _worst(self.gradients)
        yield _row("worst first gradient", [worst], GRADIENT_TOLERANCE, name)
        name, worst = _worst(self.parameters)
        yield _row("worst last parameter", [worst], PARAMETER_TOLERANCE, name)


def _row(name: str, off: Sequence[float], tolerance: float, where: str) -> Row:
    worst = float(np.max(off))  # NaN if any is
    note = f"at most {tolerance:g}, {where}"
    return Row(name, f"{worst:.1e}", note, bool(worst <= tolerance))


def _worst(of_stages: Sequence[Mapping[str, float]]) -> tuple[str, float]:
    """The array that is furthest off, in words, and how far."""
    count = sum(map(len, of_stages))
    named = (
        (f"of {count}: stage {stage}, {name}", off)
        for stage, own in enumerate(of_stages)
        for name, off in own.items()
    )
    return max(named, key=lambda each: math.inf if math.isnan(each[1]) else each[1])


def compare_training(stages: Sequence[StageResult], plain: PlainTraining) -> TrainingDifference:
    """How far two stages' training is from that of one device.

    Args:
        stages: What each stage's process has found.

    Raises:
        ValueError: If a stage has other arrays than its part of the model.
    """
    told = stages[0].figures  # losses and norms are of both stages, and the same on both
    gradients, parameters = [], []
    for stage, before, after in zip(stages, plain.began, plain.ended, strict=True):
        got = stage.arrays
        if got.keys() != after.keys():
            raise ValueError(f"got {sorted(got)}, expected {sorted(after)}")
        first, last = _named(GRADIENT, got), _named(PARAMETER, got)
        gradients.append({name: _of_largest(got[name], after[name]) for name in first})
        steps = len(plain.losses)
        parameters.append(
            {name: _of_way(got[name], before[name], after[name], steps) for name in last}
        )
    return TrainingDifference(
        _relative(told["losses"], plain.losses),
        _relative(told["norms"], plain.norms),
        gradients,
        parameters,
    )


def _named(kind: str, arrays: Mapping[str, np.ndarray]) -> list[str]:
    return [name for name in arrays if name.startswith(f"{kind} ")]


def _relative(got: Sequence[float], expected: Sequence[float]) -> list[float]:
    """How far each is off; NaN where either is."""
    return [abs(one / other - 1) for one, other in zip(got, expected, strict=True)]


def _of_largest(got: np.ndarray, expected: np.ndarray) -> float:
    wanted = np.float64(expected)
    return float(np.max(np.abs(got - wanted)) / np.max(np.abs(wanted)))


def _of_way(got: np.ndarray, before: np.ndarray, after: np.ndarray, steps: int) -> float:
    """How far an array is from where it should be, as a share of how far that is from before."""
    wanted = np.float64(after)
    rounded = steps * _ROUNDING * np.linalg.norm(wanted)
    way = np.linalg.norm(wanted - before) + rounded / PARAMETER_TOLERANCE
    return float(np.linalg.norm(got - wanted) / way)
