import pytest

from jaxmorph.schedule.copy_costs import CopyCosts


def test_impossible_costs_are_refused():
    with pytest.raises(ValueError, match="fetch_ms: got 1 stages, expected 2"):
        CopyCosts((1.0, 2.0), (1.0,))
    with pytest.raises(ValueError, match="expected finite numbers of ms, at least 0"):
        CopyCosts((1.0, 2.0), (1.0, -1.0))
