"""Shows a run or a comparison as it proceeds: a live table on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from statistics import median
from typing import IO

from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxmorph.output import best_effort, drain
from jaxmorph.records import Event, RunHeader, RunSummary, StepRecord
from jaxmorph.report.history import RunHistory
from jaxmorph.report.matrix_table import short_cell
from jaxmorph.report.run_matrix import Matrix
from jaxmorph.report.text import (
    describe_plan,
    duration,
    header_rows,
    loss_text,
    percent,
    routes_text,
    seconds_as_ms,
    sparkline,
    summary_rows,
)

_SECONDS_BETWEEN_FRAMES = 0.2  # drawing takes milliseconds, too long for every short step
_PLAIN_COLUMNS = {  # widths by name; the last column has none
    "step": 6, "loss": 9, "held_out": 9, "grad_norm": 9, "tokens/s": 10, "step_ms": 9,
    "planned_ms": 10, "bubble": 8, "plan_bubble": 11, "routes": 0,
}  # fmt: skip
_ROWS = 10  # of the live table
_BAR_WIDTH = 30
_CLOSED = "standard output was closed: the run continues, and writes to its directory"


def open_console(console: Console | None = None) -> tuple[Console, bool]:
    """A console (standard output by default), and whether it is a terminal that can redraw."""
    console = console or Console()
    if isinstance(console.file, TextIOWrapper):  # an ASCII-only stream must not end the run
        console.file.reconfigure(errors="replace")
    return console, console.is_terminal and not console.is_dumb_terminal


class Reporter:
    """Shows a run to its user; this one shows nothing."""

    def say(self, line: str) -> None:
        """Show what a run that starts or ends is about to do."""

    def start(self, header: RunHeader) -> None:
        """Show what is about to run."""

    def step(self, record: StepRecord) -> None:
        """Show a finished step."""

    def event(self, event: Event) -> None:
        """Show an event."""

    def go_back(self, step: int) -> None:
        """Withdraw `step` and later steps, which will be done again."""

    def finish(self, summary: RunSummary) -> None:
        """Show the summary of the run."""

    def close(self) -> None:
        """Release the terminal, also after an error; safe to call twice."""


def open_reporter(console: Console | None = None, *, plain: bool = False) -> Reporter:
    """A live table on a console that can redraw (standard output by default), else plain lines.

    Args:
        plain: Plain lines in any case, as for a cluster's launcher, which may start tasks on
            terminals of its own and gather their output in a log.
    """
    console, can_redraw = _open_for_a_run(console)
    return LiveReporter(console) if can_redraw and not plain else PlainReporter(console.file)


def _open_for_a_run(console: Console | None) -> tuple[Console, bool]:
    """A console whose reader can't stop a run, and whether it is a terminal that can redraw."""
    if console is not None:
        return open_console(console)
    file = best_effort(sys.stdout, _CLOSED)
    console, can_redraw = open_console(Console(file=file))
    return console, can_redraw and file.isatty()  # FORCE_COLOR doesn't make a file a terminal


class LiveReporter(Reporter):
    """Redraws a table in place; events scroll by above it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self._console = console
        self._clock = clock
        self._history = RunHistory()
        self._num_steps = 0
        self._drawn_at = float("-inf")
        self._live = Live(console=console, auto_refresh=False)

    def say(self, line: str) -> None:
        """Print a line, above the table if there is one."""
        self._console.print(Text(line, style="dim"))

    def start(self, header: RunHeader) -> None:
        """Print the header, and start the table."""
        self._num_steps = header.num_steps
        self._console.print(header_panel(header))
        self._live.start()
        self._draw()

    def step(self, record: StepRecord) -> None:
        """Add a step, and redraw if the last frame is old enough."""
        self._history.add(record)
        if self._clock() - self._drawn_at >= _SECONDS_BETWEEN_FRAMES:
            self._draw()

    def event(self, event: Event) -> None:
        """Print an event above the table."""
        self._console.print(event_line(event))

    def go_back(self, step: int) -> None:
        """Remove steps from the table."""
        self._history.go_back(step)
        self._draw()

    def finish(self, summary: RunSummary) -> None:
        """Keep the last table, and print the summary below it."""
        self.close()
        self._console.print(_panel("done", summary_rows(summary), "green"))

    def close(self) -> None:
        """Draw the last frame, and release the terminal."""
        if self._live.is_started:
            self._draw()
            self._live.stop()
        drain(self._console.file)

    def _draw(self) -> None:
        self._live.update(live_view(self._history, self._num_steps), refresh=True)
        self._drawn_at = self._clock()


class PlainReporter(Reporter):
    """Writes aligned lines, flushed one by one, for files, pipes and logs."""

    def __init__(self, file: IO[str]):
        self._file = file
        self._has_column_names = False
        self._columns = dict(_PLAIN_COLUMNS)

    def say(self, line: str) -> None:
        """Write a line."""
        self._write(line)

    def start(self, header: RunHeader) -> None:
        """Write the header."""
        if not header.evaluates:
            del self._columns["held_out"]
        self._write_rows(header_rows(header))

    def step(self, record: StepRecord) -> None:
        """Write a step, the first one below the names of the columns."""
        if not self._has_column_names:
            self._write_cells({name: name for name in self._columns})
            self._has_column_names = True
        cells = {
            "step": str(record.step),
            "loss": loss_text(record.loss),
            "held_out": loss_text(record.held_out_loss),
            "grad_norm": f"{record.grad_norm:.3f}",
            "tokens/s": f"{record.tokens_per_s:,.0f}",
            "step_ms": seconds_as_ms(record.step_s),
            "planned_ms": seconds_as_ms(record.predicted_step_s),
            "bubble": percent(record.bubble_rate),
            "plan_bubble": percent(record.planned_bubble_rate),
            "routes": routes_text(record),
        }
        self._write_cells(cells)

    def event(self, event: Event) -> None:
        """Write an event."""
        self._write(event_line(event).plain)

    def finish(self, summary: RunSummary) -> None:
        """Write the summary."""
        self._write_rows(summary_rows(summary))

    def close(self) -> None:
        """Wait briefly until everything is written."""
        drain(self._file)

    def _write_rows(self, rows: list[tuple[str, str]]) -> None:
        for label, text in rows:
            self._write(f"{label:<9} {text}")

    def _write_cells(self, cells: Mapping[str, str]) -> None:
        self._write("  ".join(f"{cells[name]:>{width}}" for name, width in self._columns.items()))

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


def header_panel(header: RunHeader) -> RenderableType:
    """The header in a frame."""
    return _panel("jaxmorph", header_rows(header), "cyan")


def live_view(history: RunHistory, num_steps: int) -> RenderableType:
    """The last steps, a sparkline of the loss, the progress, the plan and degraded links."""
    if not history.recent:  # after going back far, there are steps but no records of them
        return Text(f"waiting for the {'next' if history else 'first'} step", style="dim")
    below = Table.grid(padding=(0, 2))
    below.add_row(*_course("loss", history.losses))
    if history.held_out_losses:
        below.add_row(*_course("held out", history.held_out_losses))
    below.add_row(*_progress(history, num_steps))
    lines = _plan_and_links(history.recent[-1])
    return Group(step_table(list(history.recent)[-_ROWS:]), below, *lines)


def step_table(records: Sequence[StepRecord]) -> Table:
    """A row for each step, with measured values beside planned ones."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), show_edge=False)
    for name in ("step", "loss", "grad norm", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("step ms / plan", justify="right", no_wrap=True)
    table.add_column("bubble / plan", justify="right", no_wrap=True)
    table.add_column("routes", min_width=6)  # the only column that shrinks on a narrow terminal
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
        f"{seconds_as_ms(record.step_s)} / {seconds_as_ms(record.predicted_step_s)}",
        # one percent sign for both
        f"{percent(record.bubble_rate).removesuffix(' %')} / {percent(record.planned_bubble_rate)}",
        Text(routes_text(record), no_wrap=True, overflow="ellipsis"),
    ]


def _course(label: str, losses: Sequence[float]) -> tuple[RenderableType, ...]:
    line = Text(sparkline(losses, _BAR_WIDTH), style="green")
    return Text(f"  {label}", style="dim"), line, Text(f"{losses[0]:.4f} → {losses[-1]:.4f}")


def _plan_and_links(record: StepRecord) -> list[Text]:
    if record.replicas is None:
        plans = {"plan": describe_plan(record)}
    else:
        plans = {f"r{index}": describe_plan(each) for index, each in enumerate(record.replicas)}
    lines = [_labelled(label, plan, "") for label, plan in plans.items()]
    if record.link_states:
        states = ", ".join(f"{link} {state}" for link, state in record.link_states.items())
        lines.append(_labelled("links", states, "bold yellow"))
    return lines


def _labelled(label: str, text: str, style: str) -> Text:
    return Text.assemble((f"  {label:<6}", "dim"), (text, style), no_wrap=True, overflow="ellipsis")


def _progress(history: RunHistory, num_steps: int) -> tuple[RenderableType, ...]:
    done = history.recent[-1].step + 1  # more than the history has, if the run was resumed
    left = num_steps - done
    seconds_left = left * median(record.step_s for record in history.recent)
    remaining = f"{duration(seconds_left)} left" if left > 0 else "finished"
    bar = ProgressBar(total=num_steps, completed=done, width=_BAR_WIDTH)
    return Text("  step", style="dim"), bar, Text(f"{done} of {num_steps}, {remaining}")


class MatrixView:
    """Shows a comparison: a table redrawn in place, or a line for each system."""

    def __init__(self, console: Console | None = None) -> None:
        self._console, can_redraw = _open_for_a_run(console)
        self._live = Live(console=self._console, auto_refresh=False) if can_redraw else None
        self._last = ""

    def say(self, line: str) -> None:
        """Print a line, above the table if there is one."""
        self._console.print(Text(line), soft_wrap=self._live is None)
        self._console.file.flush()

    def update(self, matrix: Matrix, doing: str) -> None:
        """Show the runs so far, and what is running."""
        if self._live is not None:
            self._live.start()
            self._live.update(matrix_view(matrix, doing), refresh=True)
        elif doing and doing != self._last:
            self.say(doing)
        self._last = doing

    def close(self) -> None:
        """Release the terminal, with the last table on it; safe to call twice."""
        if self._live is not None:
            self._live.stop()
        drain(self._console.file)


def matrix_view(matrix: Matrix, doing: str = "") -> RenderableType:
    """The runs so far, systems in rows and conditions in columns, and what is running."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("step ms", no_wrap=True)
    for condition in matrix.conditions:
        table.add_column(Text(condition), justify="right")  # its brackets are no markup
    for system, row in matrix.rows():
        table.add_row(matrix.label(system), *map(short_cell, row))
    return Group(table, Text(doing, style="dim")) if doing else table
