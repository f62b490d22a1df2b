import math

import numpy as np
import pytest

from jaxmorph.gpu_check.parity import ParityReport, difference

EXPECTED = {"layers": {"kernel": np.array([1.0, -4.0]), "bias": np.array([0.5])}}


def test_a_gradient_is_off_by_a_share_of_its_largest_element():
    got = {"layers": {"kernel": np.array([1.2, -4.0]), "bias": np.array([0.5])}}
    found = difference(np.float32(2.0), got, np.float32(2.0), EXPECTED)
    assert found.loss == 0
    assert found.worst == ("['layers']['kernel']", pytest.approx(0.05))
    assert found.gradients["['layers']['bias']"] == 0
    assert found.norm == pytest.approx(1 - math.sqrt(17.25 / 17.69), rel=0.02)


def test_gradients_of_other_parameters_are_refused():
    with pytest.raises(ValueError, match="expected"):
        difference(np.float32(2), {"layers": {}}, np.float32(2), EXPECTED)


@pytest.mark.parametrize(
    ("loss", "factor", "verdicts"),
    [
        (2.0, 1.0, [True, True, True]),
        (2.1, 1.0, [False, True, True]),
        (2.0, 1.001, [True, False, False]),
        (math.nan, math.nan, [False, False, False]),
    ],
    ids=["equal", "loss", "gradients", "nan"],
)
def test_what_is_too_far_off_does_not_hold(loss, factor, verdicts):
    got = {
        "layers": {name: leaf * factor for name, leaf in EXPECTED["layers"].items()},
    }
    found = difference(np.float32(loss), got, np.float32(2.0), EXPECTED)
    rows = ParityReport("sizes", {"F, BW": found}).rows()
    assert [row.holds for row in rows if row.holds is not None] == verdicts
