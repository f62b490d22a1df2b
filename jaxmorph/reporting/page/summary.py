"""What a run achieved, in one sentence and a few figures."""

from collections.abc import Iterator, Sequence
from statistics import median

from jaxmorph.reporting.page.changes import count_morphs
from jaxmorph.reporting.page.elements import Html, element
from jaxmorph.reporting.page.run_files import RunFiles, StepLine
from jaxmorph.reporting.page.tables import milliseconds, share
from jaxmorph.reporting.text import describe_regime, longer_than_planned


def result_sentence(files: RunFiles) -> str:
    """The run in one sentence, such as `120 steps, median 412.0 ms; 2 morphs; ...`.

    Args:
        files: What the run directory says.
    """
    if not files.steps:
        return "No step has been recorded yet."
    morphs = count_morphs(files.steps, files.events)
    parts = [
        f"{_steps_text(files)}, median {milliseconds(median_step_ms(files.steps))}",
        f"{morphs} morph{'' if morphs == 1 else 's'}" if morphs else "no morph",
    ]
    longer = longer_than_predicted(files.steps)
    if longer is not None:
        parts.append(f"steps took {_apart(longer)} predicted")
    return f"{'; '.join(parts)}."


def median_step_ms(steps: Sequence[StepLine]) -> float:
    """The median step of at least one, milliseconds."""
    return median(step.step_ms for step in steps)


def longer_than_predicted(steps: Sequence[StepLine]) -> float | None:
    """By which share the median step was longer than its own prediction: `longer_than_planned`."""
    return longer_than_planned((step.step_ms, step.predicted_ms) for step in steps)


def summary_section(files: RunFiles) -> Html:
    """The sentence, what ran, and figures.

    Args:
        files: What the run directory says.
    """
    tiles = (
        element("div", element("dt", name), element("dd", value)) for name, value in _figures(files)
    )
    return element(
        "section",
        element("p", result_sentence(files), class_="result"),
        *(element("p", line, class_="what") for line in _what_ran(files)),
        element("dl", *tiles, class_="figures"),
        aria_label="Summary",
    )


def _steps_text(files: RunFiles) -> str:
    count, wanted = len(files.steps), files.config.run.steps if files.config else None
    some = f"{count:,} step{'' if count == 1 else 's'}"
    if wanted is None or files.steps[-1].step + 1 >= wanted:
        return some
    return f"{count:,} of {wanted:,} steps so far"


def _apart(longer: float) -> str:
    if abs(longer) < 0.0005:
        return "as long as"
    return f"{abs(longer):.1%} {'longer' if longer > 0 else 'shorter'} than".replace("%", " %")


def _what_ran(files: RunFiles) -> Iterator[str]:
    if files.config is not None:
        config = files.config
        stages, batch = config.parallelism.stages, config.batch
        yield (
            f"{config.model.factory} {config.model.preset}, "
            f"{stages} stage{'' if stages == 1 else 's'}, "
            f"{batch.microbatches} microbatches of {batch.microbatch_size}; "
            f"{describe_regime(config.emulation)}."
        )
    if files.num_unreadable:
        count = files.num_unreadable
        says = "1 line is" if count == 1 else f"{count} lines are"
        yield f"{says} incomplete and left out, such as the last of a run that was cut off."


def _figures(files: RunFiles) -> Iterator[tuple[str, str]]:
    steps = files.steps
    if not steps:
        return
    times = sorted(step.step_ms for step in steps)
    yield "median step", milliseconds(median(times))
    yield "slowest step", milliseconds(times[-1])
    predicted = [step.predicted_ms for step in steps if step.predicted_ms is not None]
    if predicted:
        yield "median prediction", milliseconds(median(predicted))
    bubbles = [step.bubble_rate for step in steps if step.bubble_rate is not None]
    if bubbles:
        yield "median bubble", share(median(bubbles))
    if files.goodput is not None:
        yield "goodput", share(files.goodput)
    losses = [step.loss for step in steps if step.loss is not None]
    if losses:
        yield "loss", f"{losses[0]:.3f} → {losses[-1]:.3f}"
    held_out = [step.held_out_loss for step in steps if step.held_out_loss is not None]
    if held_out:
        yield "held-out loss", f"{held_out[0]:.3f} → {held_out[-1]:.3f}"
    yield "plan at the end", _plan(steps[-1])


def _plan(step: StepLine) -> str:
    warmups = " ".join(map(str, step.warmup_forwards))
    return f"{step.schedule} {warmups}".strip() or "-"
