"""Shows steps: their timelines on one time axis, and the shares of compute and idle time."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup

from jaxmorph.report.draw.gantt import Panel, Sizes, gantt_figure
from jaxmorph.report.page.charts import COMPUTE, plot_shares, shortened
from jaxmorph.report.page.files import ShownStep
from jaxmorph.report.page.html import inline_svg, milliseconds
from jaxmorph.report.text import percent
from jaxmorph.schedule.bubbles import (
    IdleCause,
    StepShares,
    idle_spans,
    mean_shares,
    step_shares,
)
from jaxmorph.schedule.timeline import Timeline

_PAGE = Sizes(width=(8.6, 8.6), row=(0.06, 0.2), rows=2.2)

SHARES = [COMPUTE, *map(str, IdleCause)]
"""The columns of tables of shares."""

MEANINGS = (
    (COMPUTE, "an op runs"),
    (IdleCause.WARM_UP, "the pipeline fills: the data of the stage's first op isn't computed yet"),
    (IdleCause.DEPENDENCY, "another stage hasn't computed the next op's data yet"),
    (IdleCause.TRANSFER, "the next op's data is in flight"),
    (IdleCause.BLOCKING, "the data is computed, but another transfer holds a queue"),
    (
        IdleCause.COPIES,
        "the data is there, but the op's stash isn't back from host memory, or another stash must "
        "leave the device first",
    ),
    (IdleCause.DISPATCH, "the op is ready and the queue is free: the overhead of starting ops"),
    (IdleCause.COOL_DOWN, "the stage has run its last op; other stages haven't"),
    (
        IdleCause.OPTIMIZER,
        "before the step's first op and after its last: tied gradients, norms, the exchange "
        "between ranks, the update",
    ),
)


class Shown(NamedTuple):
    """Steps as a page shows them: two figures, and the cells of two tables."""

    timelines: Markup
    shares: Markup
    of_steps: list[list[str]]
    of_stages: list[list[str]]


def show_steps(steps: Sequence[ShownStep], what: str) -> Shown:
    """Figures and tables of at least one step.

    Args:
        what: What the steps belong to, such as `change 2`; unique on the page.
    """
    shares = [step_shares(step.measured, step.step_ms) for step in steps]
    means = [(step.name, mean_shares(of)) for step, of in zip(steps, shares, strict=True)]
    took = [milliseconds(step.step_ms or step.measured.makespan_ms) for step in steps]
    panels = [panel for step in steps for panel in _panels(step)]
    titles = "; ".join(f"{panel.title}, {panel.timeline.num_stages} stages" for panel in panels)
    return Shown(
        inline_svg(f"Timelines of {what}: {titles}", lambda: gantt_figure(panels, sizes=_PAGE)),
        inline_svg(f"Shares of steps of {what}", lambda: plot_shares(means)),
        [[name, ms, *_cells(mean)] for (name, mean), ms in zip(means, took, strict=True)],
        [
            [step.name, str(stage), *_cells(of_stage)]
            for step, of_stages in zip(steps, shares, strict=True)
            for stage, of_stage in enumerate(of_stages)
        ],
    )


def _panels(step: ShownStep) -> Iterator[Panel]:
    if step.planned is not None:
        yield _panel(f"{step.name}, planned", step.planned, step.planned.makespan_ms)
    step_ms = step.step_ms or step.measured.makespan_ms
    yield _panel(f"{step.name}, measured", step.measured, step_ms)


def _panel(name: str, timeline: Timeline, step_ms: float) -> Panel:
    title = f"{shortened(name)}: {milliseconds(step_ms)}"
    end_ms = max(timeline.makespan_ms, step_ms)
    return Panel(title, timeline, idle_spans(timeline, step_ms), end_ms)


def _cells(shares: StepShares) -> list[str]:
    return [percent(share) for share in shares]
