from dataclasses import replace
from pathlib import Path

import pytest

from jaxmorph.reporting import Event, RunHistory, StepRecord
from jaxmorph.reporting.history import RECENT
from jaxmorph.reporting.text import longer_than_planned, summary_rows

STEP = StepRecord(
    step=0, loss=5.0, grad_norm=1.5, step_s=0.4, tokens_per_s=10_240.0, schedule="zb-h2",
    warmup_forwards=(3, 1), routes={"0-1": "direct"}, predicted_step_s=0.39, bubble_rate=0.125,
    peak_live=(3, 1), compilations=0, planned_bubble_rate=0.11,
)  # fmt: skip


def history_of(*records):
    history = RunHistory()
    for record in records:
        history.add(record)
    return history


def test_only_the_last_records_are_kept_whole_and_every_loss():
    history = history_of(*(replace(STEP, step=n, loss=float(n)) for n in range(3 * RECENT)))
    assert [record.step for record in history.recent] == list(range(2 * RECENT, 3 * RECENT))
    assert list(history.losses) == [float(n) for n in range(3 * RECENT)]
    assert len(history) == 3 * RECENT


def test_a_summary_has_medians_of_what_is_known():
    history = history_of(
        replace(STEP, step_s=0.1, predicted_step_s=None, held_out_loss=5.5),
        replace(STEP, step_s=0.2, predicted_step_s=0.3, loss=4.0),
        replace(STEP, step_s=0.9, predicted_step_s=0.5, loss=3.0, held_out_loss=3.5),
    )
    summary = history.summary(elapsed_s=2.0, run_directory=Path("runs/a"))
    assert (summary.losses, summary.held_out_losses) == ((5.0, 4.0, 3.0), (5.5, 3.5))
    assert (summary.step_s, summary.predicted_step_s) == (0.2, 0.4)


def test_a_summary_counts_the_steps_that_were_skipped():
    skipped = replace(STEP, loss=float("nan"), skipped=True)
    summary = history_of(STEP, skipped, STEP, skipped).summary(
        elapsed_s=2.0, run_directory=Path("runs/a")
    )
    assert summary.skipped_steps == 2
    assert summary_rows(summary)[0] == ("steps", "4 in 2.0 s, 2 of them skipped: not finite")


def test_a_summary_has_the_most_that_was_in_use_whichever_life_it_was_in():
    records = [replace(STEP, peak_device_bytes=peaks) for peaks in ((5 << 20, 4), (9, 7 << 20))]
    summary = history_of(*records).summary(elapsed_s=2.0, run_directory=Path("runs/a"))
    assert summary.peak_device_bytes == (5 << 20, 7 << 20)
    assert dict(summary_rows(summary))["memory"] == "at most 7.0 MiB in use on a device (stage 1)"
    silent = history_of(STEP).summary(elapsed_s=2.0, run_directory=Path("runs/a"))
    assert "memory" not in dict(summary_rows(silent))


def test_steps_are_held_against_their_own_plans():
    """Medians of all steps and of all plans would say 10 %."""
    history = history_of(
        replace(STEP, step_s=0.1, predicted_step_s=0.1),
        replace(STEP, step_s=0.4, predicted_step_s=None),
        *[replace(STEP, step_s=0.4, predicted_step_s=0.4)] * 2,
        *[replace(STEP, step_s=0.11, predicted_step_s=0.1)] * 3,
    )
    summary = history.summary(elapsed_s=2.0, run_directory=Path("runs/a"))
    assert summary.longer_than_planned == pytest.approx(0.05)
    assert longer_than_planned([]) is None


def test_what_no_step_knows_the_summary_does_not_know():
    bare = replace(STEP, predicted_step_s=None, bubble_rate=None, planned_bubble_rate=None)
    summary = history_of(bare).summary(elapsed_s=2.0, run_directory=Path("runs/a"))
    assert summary.predicted_step_s is summary.bubble_rate is summary.planned_bubble_rate is None
    assert summary.held_out_losses == ()


def test_steps_that_will_be_done_again_are_forgotten():
    steps = [
        replace(
            STEP,
            step=n,
            loss=float(n),
            step_s=0.1 * (n + 1),
            predicted_step_s=0.2 if n % 2 else None,
            held_out_loss=9.0 - n if n % 3 == 0 else None,
            skipped=n in (1, 5),
        )
        for n in range(8)
    ]
    history = history_of(*steps)
    for step in (2, 4, 6):
        history.note(Event(1.0, step, "plan_changed"))
    history.go_back(4)
    expected = history_of(*steps[:4])
    expected.note(Event(1.0, 2, "plan_changed"))
    summaries = [
        each.summary(elapsed_s=1.0, run_directory=Path("a")) for each in (history, expected)
    ]
    assert summaries[0] == summaries[1]
    assert [record.step for record in history.recent] == [0, 1, 2, 3]
    assert history.productive_s == pytest.approx(0.1 + 0.2 + 0.3 + 0.4)
    history.add(steps[4])
    assert list(history.losses) == [0.0, 1.0, 2.0, 3.0, 4.0]
    history.go_back(0)
    assert len(history) == 0
