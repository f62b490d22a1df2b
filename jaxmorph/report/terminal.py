"""Shows a run or a comparison while it goes: a live table on a terminal, plain lines elsewhere."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from statistics import median
from typing import IO, Protocol

from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxmorph.records import Event, RunHeader, RunSummary, StepRecord
from jaxmorph.report.history import RECENT, RunHistory
from jaxmorph.report.matrix_table import short_cell
from jaxmorph.report.run_matrix import Matrix
from jaxmorph.report.text import (
    describe_plan,
    describe_routes,
    duration,
    header_rows,
    loss_text,
    milliseconds,
    percent,
    sparkline,
    summary_rows,
)

_SECONDS_BETWEEN_FRAMES = 0.2  # drawing costs milliseconds, and must not on every short step
_PLAIN_COLUMNS = {  # by name, how wide; the last one is as wide as it is
    "step": 6, "loss": 9, "held_out": 9, "grad_norm": 9, "tokens/s": 10, "step_ms": 9,
    "planned_ms": 10, "bubble": 8, "plan_bubble": 11, "routes": 0,
}  # fmt: skip
_ROWS = min(10, RECENT)  # steps the live table shows
_BAR_WIDTH = 30


def open_console(console: Console | None = None) -> tuple[Console, bool]:
    """A console (standard output when None), and whether it is a terminal that can redraw."""
    console = console or Console()
    if isinstance(console.file, TextIOWrapper):  # a loss must not be lost to an ASCII-only stream
        console.file.reconfigure(errors="replace")
    return console, console.is_terminal and not console.is_dumb_terminal


class Reporter(Protocol):
    """Shows a run to its user."""

    def start(self, header: RunHeader) -> None:
        """Shows what is about to run."""
        ...

    def step(self, record: StepRecord) -> None:
        """Shows one finished step."""
        ...

    def event(self, event: Event) -> None:
        """Shows an event."""
        ...

    def go_back(self, step: int) -> None:
        """Takes note that the steps from this one on will be done again."""
        ...

    def finish(self, summary: RunSummary) -> None:
        """Shows what the run achieved."""
        ...

    def close(self) -> None:
        """Gives the terminal back, finished or not; safe to call twice."""
        ...


def open_reporter(console: Console | None = None) -> Reporter:
    """Reports to a console (standard output when None): live where it can redraw, else in lines."""
    console, can_redraw = open_console(console)
    return LiveReporter(console) if can_redraw else PlainReporter(console.file)


class LiveReporter:
    """Redraws a table in place, above which events scroll by."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self._console = console
        self._clock = clock
        self._history = RunHistory()
        self._num_steps = 0
        self._drawn_at = float("-inf")
        self._live = Live(console=console, auto_refresh=False)

    def start(self, header: RunHeader) -> None:
        """Shows what is about to run, and the empty table."""
        self._num_steps = header.num_steps
        self._console.print(header_panel(header))
        self._live.start()
        self._draw()

    def step(self, record: StepRecord) -> None:
        """Adds a step, and redraws unless that was done a moment ago."""
        self._history.add(record)
        if self._clock() - self._drawn_at >= _SECONDS_BETWEEN_FRAMES:
            self._draw()

    def event(self, event: Event) -> None:
        """Prints an event above the table."""
        self._console.print(event_line(event))

    def go_back(self, step: int) -> None:
        """Takes the steps from this one on out of the table."""
        self._history.go_back(step)
        self._draw()

    def finish(self, summary: RunSummary) -> None:
        """Leaves the last table standing, and what the run achieved below it."""
        self.close()
        self._console.print(summary_panel(summary))

    def close(self) -> None:
        """Draws what was not drawn yet and gives the terminal back."""
        if self._live.is_started:
            self._draw()
            self._live.stop()

    def _draw(self) -> None:
        self._live.update(live_view(self._history, self._num_steps), refresh=True)
        self._drawn_at = self._clock()


class PlainReporter:
    """Writes aligned lines, each one at once, for files, pipes and logs."""

    def __init__(self, file: IO[str]):
        self._file = file
        self._has_column_names = False
        self._columns = dict(_PLAIN_COLUMNS)

    def start(self, header: RunHeader) -> None:
        """Writes what is about to run."""
        if not header.evaluates:
            del self._columns["held_out"]
        self._write_rows(header_rows(header))

    def step(self, record: StepRecord) -> None:
        """Writes a step, the first one below the names of the columns."""
        if not self._has_column_names:
            self._write_cells({name: name for name in self._columns})
            self._has_column_names = True
        cells = {
            "step": str(record.step),
            "loss": loss_text(record.loss),
            "held_out": loss_text(record.held_out_loss),
            "grad_norm": f"{record.grad_norm:.3f}",
            "tokens/s": f"{record.tokens_per_s:,.0f}",
            "step_ms": milliseconds(record.step_s),
            "planned_ms": milliseconds(record.predicted_step_s),
            "bubble": percent(record.bubble_rate),
            "plan_bubble": percent(record.planned_bubble_rate),
            "routes": describe_routes(record.routes),
        }
        self._write_cells(cells)

    def event(self, event: Event) -> None:
        """Writes an event."""
        self._write(event_line(event).plain)

    def go_back(self, step: int) -> None:
        """Leaves the lines as they are: those of steps that are done again come below."""

    def finish(self, summary: RunSummary) -> None:
        """Writes what the run achieved."""
        self._write_rows(summary_rows(summary))

    def close(self) -> None:
        """Has nothing to give back: every line is already written."""

    def _write_rows(self, rows: list[tuple[str, str]]) -> None:
        for label, text in rows:
            self._write(f"{label:<9} {text}")

    def _write_cells(self, cells: Mapping[str, str]) -> None:
        self._write("  ".join(f"{cells[name]:>{width}}" for name, width in self._columns.items()))

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


def header_panel(header: RunHeader) -> RenderableType:
    """What is about to run, in a frame."""
    return _panel("jaxmorph", header_rows(header), "cyan")


def summary_panel(summary: RunSummary) -> RenderableType:
    """What the run achieved, in a frame."""
    return _panel("done", summary_rows(summary), "green")


def live_view(history: RunHistory, num_steps: int) -> RenderableType:
    """The run so far: its last steps, the course of the loss and how long it will still take."""
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
    """Steps as a table, a row each, measured values beside planned ones."""
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
    """An event on one line."""
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


class MatrixView:
    """Shows a comparison: a table redrawn in place, or a line when another system's turn comes."""

    def __init__(self, console: Console | None = None) -> None:
        self._console, can_redraw = open_console(console)
        self._live = Live(console=self._console, auto_refresh=False) if can_redraw else None
        self._last = ""

    def say(self, line: str) -> None:
        """Shows a line, above the table if there is one."""
        self._console.print(Text(line), soft_wrap=self._live is None)
        self._console.file.flush()

    def update(self, matrix: Matrix, doing: str) -> None:
        """Shows the runs so far, and what is being run."""
        if self._live is not None:
            self._live.start()
            self._live.update(matrix_view(matrix, doing), refresh=True)
        elif doing and doing != self._last:
            self.say(doing)
        self._last = doing

    def close(self) -> None:
        """Gives the terminal back, with the last table on it; safe to call twice."""
        if self._live is not None:
            self._live.stop()


def matrix_view(matrix: Matrix, doing: str = "") -> RenderableType:
    """The runs so far, systems in rows and conditions in columns, and what is being run."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("step ms", no_wrap=True)
    for condition in matrix.conditions:
        table.add_column(condition, justify="right")
    for system, row in matrix.rows():
        table.add_row(system, *map(short_cell, row))
    return Group(table, Text(doing, style="dim")) if doing else table
