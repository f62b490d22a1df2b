import math

from jaxmorph.runtime.report import StepTotals
from jaxmorph.training.gradients import SkippedSteps

SOUND = StepTotals(2.0, 1.0)
BAD = StepTotals(math.nan, math.inf, {2: "loss nan"})


def noted(stop_after, *steps):
    """Whether each was one too many, and why in the end."""
    skipped = SkippedSteps(stop_after)
    return [skipped.note(number, each) for number, each in enumerate(steps)], skipped.why_stop


def test_so_many_in_a_row_stop_the_run_with_the_last_finite_step_and_what_to_try():
    stops, last = noted(3, BAD, SOUND, BAD, BAD, SOUND, BAD, BAD, BAD)
    assert stops == [False] * 7 + [True]
    assert last.startswith("3 steps in a row were not finite, the latest, step 7, with loss nan, ")
    assert "; stage 2: loss nan; the last finite step was 4, and parameters are as it left" in last
    assert "; try an earlier checkpoint with a lower optimizer.learning_rate" in last
    assert last.endswith("(optimizer.stop_after_skipped: 3)")
    assert "\n" not in last


def test_a_run_without_any_finite_step_says_so():
    assert "no step since the start was finite" in noted(2, BAD, BAD)[1]


def test_without_a_number_no_run_is_stopped():
    assert noted(None, *[BAD] * 50) == ([False] * 50, "")


def saved_after(steps, every, keep_last=True):
    """After how many steps there is a save, of which every so manieth should be one."""
    skipped, saved = SkippedSteps(None), []
    for done, totals in enumerate(steps, start=1):
        skipped.note(done - 1, totals)
        is_last = keep_last and done == len(steps)
        if skipped.lets_save(done % every == 0 or is_last, is_last):
            saved.append(done)
    return saved


def test_what_is_skipped_is_not_saved_and_what_fell_due_comes_after_the_next_update():
    steps = [SOUND, SOUND, BAD, BAD, BAD, SOUND, SOUND, SOUND, BAD]
    assert saved_after(steps, every=1, keep_last=False) == [1, 2, 6, 7, 8]
    assert saved_after(steps, every=4, keep_last=False) == [6, 8]


def test_the_last_state_is_saved_whatever_its_step_was():
    assert saved_after([SOUND, BAD, BAD], every=2) == [3]
