"""The report of a run as rich renderables, made by pure functions of its records."""

import math
from collections.abc import Sequence
from statistics import median

from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxmorph.reporting.history import RECENT, RunHistory
from jaxmorph.reporting.records import Event, RunHeader, RunSummary, StepRecord
from jaxmorph.reporting.text import (
    describe_plan,
    describe_routes,
    duration,
    header_rows,
    milliseconds,
    percent,
    sparkline,
    summary_rows,
)

_ROWS = min(10, RECENT)  # steps the live table shows
_BAR_WIDTH = 30


def header_panel(header: RunHeader) -> RenderableType:
    """What is about to run, in a frame.

    Returns:
        A panel of labels and texts.
    """
    return _panel("jaxmorph", header_rows(header), "cyan")


def summary_panel(summary: RunSummary) -> RenderableType:
    """What the run achieved, in a frame.

    Returns:
        A panel of labels and texts.
    """
    return _panel("done", summary_rows(summary), "green")


def live_view(history: RunHistory, num_steps: int) -> RenderableType:
    """The run so far: its last steps, the course of the loss and how long it will still take.

    Args:
        num_steps: steps of the whole run.

    Returns:
        A table above three lines, and more if the run has held-out losses or links that are not
        healthy.
    """
    if not history:
        return Text("waiting for the first step", style="dim")
    below = Table.grid(padding=(0, 2))
    below.add_row(*_course("loss", history.losses))
    if history.held_out_losses:
        below.add_row(*_course("held out", history.held_out_losses))
    below.add_row(*_progress(history, num_steps))
    lines = _plan_and_links(history.recent[-1])
    return Group(step_table(list(history.recent)[-_ROWS:]), below, *lines)


def step_table(records: Sequence[StepRecord]) -> Table:
    """Steps as a table, a row each.

    Returns:
        The table, measured values beside planned ones.
    """
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), show_edge=False)
    for name in ("step", "loss", "grad norm", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("step ms / plan", justify="right", no_wrap=True)
    table.add_column("bubble / plan", justify="right", no_wrap=True)
    table.add_column("routes", min_width=6)  # the one column that gives way on a narrow terminal
    for index, record in enumerate(records):
        table.add_row(*_cells(record), style="" if index == len(records) - 1 else "dim")
    return table


def event_line(event: Event) -> Text:
    """An event on one line.

    Returns:
        The line.
    """
    where = f" {event.link}" if event.link else ""
    line = Text.assemble(
        (f"step {event.step} ", "dim"), (event.kind.replace("_", " ") + where, "bold yellow")
    )
    return line.append(f"  {event.detail}") if event.detail else line


def _panel(title: str, rows: Sequence[tuple[str, str]], color: str) -> Panel:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, Text(text))
    return Panel(
        grid, title=f"[bold]{title}", title_align="left", border_style=color, box=ROUNDED,
        expand=False, padding=(0, 1),
    )  # fmt: skip


def _cells(record: StepRecord) -> list[RenderableType]:
    loss = Text(f"{record.loss:.4f}", style="green" if math.isfinite(record.loss) else "bold red")
    return [
        str(record.step),
        loss,
        f"{record.grad_norm:.3f}",
        f"{record.tokens_per_s:,.0f}",
        f"{milliseconds(record.step_s)} / {milliseconds(record.predicted_step_s)}",
        f"{_share(record.bubble_rate)} / {percent(record.planned_bubble_rate)}",
        Text(describe_routes(record.routes), no_wrap=True, overflow="ellipsis"),
    ]


def _share(rate: float | None) -> str:
    """A share without the percent sign that follows its neighbour."""
    return percent(rate).removesuffix(" %")


def _course(label: str, losses: Sequence[float]) -> tuple[RenderableType, ...]:
    line = Text(sparkline(losses, _BAR_WIDTH), style="green")
    return Text(f"  {label}", style="dim"), line, Text(f"{losses[0]:.4f} → {losses[-1]:.4f}")


def _plan_and_links(record: StepRecord) -> list[Text]:
    """The plan that the last step ran, and the links that were not healthy in it."""
    lines = [_labelled("plan", describe_plan(record), "")]
    if record.link_states:
        states = ", ".join(f"{link} {state}" for link, state in record.link_states.items())
        lines.append(_labelled("links", states, "bold yellow"))
    return lines


def _labelled(label: str, text: str, style: str) -> Text:
    return Text.assemble((f"  {label:<6}", "dim"), (text, style), no_wrap=True, overflow="ellipsis")


def _progress(history: RunHistory, num_steps: int) -> tuple[RenderableType, ...]:
    done = history.recent[-1].step + 1  # a run that was resumed has done more than it has seen
    left = num_steps - done
    seconds_left = left * median(record.step_s for record in history.recent)
    remaining = f"{duration(seconds_left)} left" if left > 0 else "finished"
    bar = ProgressBar(total=num_steps, completed=done, width=_BAR_WIDTH)
    return Text("  step", style="dim"), bar, Text(f"{done} of {num_steps}, {remaining}")
