import numpy as np
import pytest

from jaxmorph.gpu_check.one_device import PlainTraining
from jaxmorph.gpu_check.stage_processes import StageResult
from jaxmorph.gpu_check.training_difference import compare_training

NAMES = ("['layers']['kernel']", "['layers']['bias']")
BEGAN = {f"parameter {name}": np.array([1.0, -4.0], np.float32) for name in NAMES}
ENDED = {f"parameter {name}": np.array([1.01, -4.02], np.float32) for name in NAMES}
FIRST = {f"gradient {name}": np.array([0.2, -0.5], np.float32) for name in NAMES}
PLAIN = PlainTraining(
    losses=[3.0, 2.5], norms=[1.0, 0.5], step_ms=1.0, began=[BEGAN] * 2, ended=[FIRST | ENDED] * 2
)


def trained(losses=(3.0, 2.5), norms=(1.0, 0.5), **arrays):
    """Two stages of which the second has some arrays that differ from the one device's."""
    figures = {"losses": list(losses), "norms": list(norms)}
    other = {name.replace("_", " ", 1): value for name, value in arrays.items()}
    return [StageResult(figures, FIRST | ENDED), StageResult(figures, FIRST | ENDED | other)]


def verdicts(stages):
    """Of losses, norms, gradients and parameters."""
    return [row.holds for row in compare_training(stages, PLAIN).rows()]


def array(kind, *values):
    return {f"{kind}_{NAMES[1]}": np.array(values, np.float32)}


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (trained(), [True, True, True, True]),
        (trained(losses=(3.0, 2.5001)), [False, True, True, True]),
        (trained(norms=(1.0001, 0.5)), [True, False, True, True]),
        (trained(norms=(1.0, float("nan"))), [True, False, True, True]),
        (trained(**array("gradient", 0.2, -0.5003)), [True, True, False, True]),
        (trained(**array("parameter", 1.01, -4.0201)), [True, True, True, False]),
        (trained(**array("parameter", 1.0, -4.0)), [True, True, True, False]),
        (trained(**array("parameter", 1.01, float("nan"))), [True, True, True, False]),
    ],
    ids=["equal", "loss", "norm", "no norm", "gradient", "parameter", "unmoved", "not finite"],
)
def test_whatever_differs_in_one_place_does_not_hold(stages, expected):
    assert verdicts(stages) == expected


def test_the_parameter_that_is_off_is_named_with_its_stage():
    found = compare_training(trained(**array("parameter", 1.01, -4.04)), PLAIN)
    assert [*found.rows()][-1].note.endswith(f"of 4: stage 1, parameter {NAMES[1]}")
    moved, off = np.hypot(0.01, 0.02), 0.02
    rounded = 2 * 2**-23 * np.hypot(1.01, 4.02) / 1e-3
    off_by = found.parameters[1][f"parameter {NAMES[1]}"]
    assert off_by == pytest.approx(off / (moved + rounded), rel=1e-4)


def test_arrays_that_are_missing_are_refused():
    short = StageResult(trained()[1].figures, FIRST)
    with pytest.raises(ValueError, match="expected"):
        compare_training([trained()[0], short], PLAIN)
