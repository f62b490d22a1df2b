from dataclasses import replace
from pathlib import Path

import pytest

from jaxmorph.records import Event, RunSummary
from jaxmorph.report.history import RECENT, RunHistory
from jaxmorph.report.text import longer_than_planned, summary_rows


def history_of(*records):
    history = RunHistory()
    for record in records:
        history.add(record)
    return history


def summed_up(history) -> RunSummary:
    return history.summary(elapsed_s=2.0, run_directory=Path("runs/a"))


def test_every_loss_but_few_records_are_kept(step):
    history = history_of(*(replace(step, step=n, loss=float(n)) for n in range(3 * RECENT)))
    assert [record.step for record in history.recent] == list(range(2 * RECENT, 3 * RECENT))
    assert list(history.losses) == [float(n) for n in range(3 * RECENT)]
    assert len(history) == 3 * RECENT


def test_a_summary_has_medians(step):
    history = history_of(
        replace(step, step_s=0.1, predicted_step_s=None, held_out_loss=5.5),
        replace(step, step_s=0.2, predicted_step_s=0.3, loss=4.0),
        replace(step, step_s=0.9, predicted_step_s=0.5, loss=3.0, held_out_loss=3.5),
    )
    summary = summed_up(history)
    assert (summary.losses, summary.held_out_losses) == ((5.0, 4.0, 3.0), (5.5, 3.5))
    assert (summary.step_s, summary.predicted_step_s) == (0.2, 0.4)
    bare = replace(step, predicted_step_s=None, bubble_rate=None, planned_bubble_rate=None)
    summary = summed_up(history_of(bare))
    assert summary.predicted_step_s is summary.bubble_rate is summary.planned_bubble_rate is None
    assert summary.held_out_losses == ()


def test_a_summary_counts_skipped_steps(step):
    skipped = replace(step, loss=float("nan"), skipped=True)
    summary = summed_up(history_of(step, skipped, step, skipped))
    assert summary.skipped_steps == 2
    assert summary_rows(summary)[0] == ("steps", "4 in 2.0 s, 2 of them skipped: not finite")


def test_a_summary_has_the_peak_memory_of_all_launches(step):
    records = [replace(step, peak_device_bytes=peaks) for peaks in ((5 << 20, 4), (9, 7 << 20))]
    summary = summed_up(history_of(*records))
    assert summary.peak_device_bytes == (5 << 20, 7 << 20)
    assert dict(summary_rows(summary))["memory"] == "at most 7.0 MiB in use on a device (stage 1)"
    assert "memory" not in dict(summary_rows(summed_up(history_of(step))))


def test_steps_are_compared_with_their_own_plans(step):
    """Medians of all steps and of all plans would say 10 %."""
    history = history_of(
        replace(step, step_s=0.1, predicted_step_s=0.1),
        replace(step, step_s=0.4, predicted_step_s=None),
        *[replace(step, step_s=0.4, predicted_step_s=0.4)] * 2,
        *[replace(step, step_s=0.11, predicted_step_s=0.1)] * 3,
    )
    assert summed_up(history).longer_than_planned == pytest.approx(0.05)
    assert longer_than_planned([]) is None


def test_going_back_forgets_steps(step):
    steps = [
        replace(
            step,
            step=n,
            loss=float(n),
            step_s=0.1 * (n + 1),
            predicted_step_s=0.2 if n % 2 else None,
            held_out_loss=9.0 - n if n % 3 == 0 else None,
            skipped=n in (1, 5),
        )
        for n in range(8)
    ]
    history, expected = history_of(*steps), history_of(*steps[:4])
    for at in (2, 4, 6):
        history.add_event(Event(1.0, at, "plan_changed"))
    history.go_back(4)
    expected.add_event(Event(1.0, 2, "plan_changed"))
    assert summed_up(history) == summed_up(expected)
    assert [record.step for record in history.recent] == [0, 1, 2, 3]
    assert history.productive_s == pytest.approx(0.1 + 0.2 + 0.3 + 0.4)
    history.add(steps[4])
    assert list(history.losses) == [0.0, 1.0, 2.0, 3.0, 4.0]
    history.go_back(0)
    assert len(history) == 0
