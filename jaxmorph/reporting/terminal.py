"""Reports a run while it goes: a live table on a terminal, plain lines anywhere else."""

import time
from collections.abc import Callable, Mapping
from typing import IO, Protocol

from rich.console import Console
from rich.live import Live

from jaxmorph.reporting.console import open_console
from jaxmorph.reporting.history import RunHistory
from jaxmorph.reporting.records import Event, RunHeader, RunSummary, StepRecord
from jaxmorph.reporting.render import event_line, header_panel, live_view, summary_panel
from jaxmorph.reporting.text import (
    describe_routes,
    header_rows,
    loss_text,
    milliseconds,
    percent,
    summary_rows,
)

_SECONDS_BETWEEN_FRAMES = 0.2  # drawing costs milliseconds, and must not on every short step
_PLAIN_COLUMNS = {  # by name, how wide; the last one is as wide as it is
    "step": 6, "loss": 9, "held_out": 9, "grad_norm": 9, "tokens/s": 10, "step_ms": 9,
    "planned_ms": 10, "bubble": 8, "plan_bubble": 11, "routes": 0,
}  # fmt: skip


class Reporter(Protocol):
    """Shows a run to its user."""

    def start(self, header: RunHeader) -> None:
        """Shows what is about to run."""
        ...

    def step(self, record: StepRecord) -> None:
        """Shows one finished step."""
        ...

    def event(self, event: Event) -> None:
        """Shows something that happened beside the steps."""
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
    """Chooses how to report.

    Args:
        console: where to write; None for standard output.

    Returns:
        A live table when the console is a terminal that can redraw, else plain lines.
    """
    console, can_redraw = open_console(console)
    return LiveReporter(console) if can_redraw else PlainReporter(console.file)


class LiveReporter:
    """Redraws a table in place, above which events scroll by.

    Args:
        clock: seconds, monotonic.
    """

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
    """Writes aligned lines, each one at once, for files, pipes and logs.

    Args:
        file: where to write.
    """

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
