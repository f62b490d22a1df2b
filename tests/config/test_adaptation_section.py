"""What the section says of adapting, and what it refuses."""

import pytest

from jaxmorph.config import check_config
from jaxmorph.errors import UserError


def run(schedule="adaptive", stages=4, **adaptation):
    return check_config(
        {
            "schedule": {"name": schedule},
            "parallelism": {"stages": stages},
            "adaptation": adaptation,
        }
    )


def test_a_run_does_not_adapt_unless_it_is_told_to_and_has_links():
    assert not run().adapts
    assert run(enabled=True).adapts
    assert not run(enabled=True, stages=1).adapts


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "1f1b-eager", "interleaved"])
def test_schedules_with_whole_backwards_cannot_adapt(schedule):
    run(schedule)
    with pytest.raises(UserError) as caught:
        run(schedule, enabled=True)
    assert str(caught.value) == (
        "config: adaptation.enabled: got true, expected false, or a schedule.name that can be "
        "replaced while a run lasts: adaptive, initial, paper, zb-h1, zb-h2"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("worth", 1.0),
        ("worth", -0.1),
        ("dwell_steps", 0),
        ("delegates", "all"),
        ("failback_steps", 0),
    ],
)
def test_what_makes_no_sense_is_refused(key, value):
    with pytest.raises(UserError, match=f"adaptation.{key}: got {value}|got '{value}'"):
        run(**{key: value})


def test_order_inside_a_step_can_only_be_off():
    assert run(intra_step="off").adaptation.intra_step == "off"
    for value in ("on", "auto"):
        with pytest.raises(UserError) as caught:
            run(intra_step=value)
        assert str(caught.value) == (
            f"config: adaptation.intra_step: got '{value}', expected 'off': changing the order "
            "inside a step was removed because it gained nothing in real runs, see "
            "docs/adaptation.md"
        )
