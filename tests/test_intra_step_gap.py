"""A few of the steps of `benchmarks.intra_step_gap`: how near choices inside a step come."""

from statistics import mean

import pytest

from benchmarks.intra_step_cases import SIZES, draw_case
from benchmarks.intra_step_gap import hold
from jaxmorph.program.instructions import Payload, Transfer

SMALL = next(iter(SIZES))


@pytest.mark.parametrize("kind", ["A", "B", "C"])
def test_under_figure_18s_delays_the_step_is_nearly_the_best_there_was(kind):
    held = [hold(draw_case(SMALL, kind, seed)) for seed in range(3)]
    inside, kept = ([gaps.of[name] for gaps in held] for name in ("inside a step", "step boundary"))
    assert max(inside) < 0.02
    assert mean(inside) < 0.5 * mean(kept)
    assert min(gaps.certified for gaps in held) > -1e-9


def test_a_link_that_turns_slow_costs_a_fraction_of_what_the_planned_order_pays():
    held = [hold(draw_case(SMALL, "jump", seed)) for seed in (0, 5)]
    inside, kept = (
        mean(gaps.of[name] for gaps in held) for name in ("inside a step", "step boundary")
    )
    assert kept > 0.1
    assert inside < 0.4 * kept


def test_a_case_is_its_seeds():
    sent = Transfer(Payload.GRADIENT, 2, 1, 5)
    first, again, other = (draw_case(SMALL, "A", seed).delay_ms(sent, 90.0) for seed in (4, 4, 5))
    assert first == again != other
