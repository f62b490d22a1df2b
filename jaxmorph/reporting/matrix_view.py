"""Shows a comparison while it goes: a live table on a terminal, plain lines anywhere else."""

from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jaxmorph.reporting.console import open_console
from jaxmorph.reporting.matrix_table import short_cell
from jaxmorph.reporting.run_matrix import Matrix


class MatrixView(Protocol):
    """Shows a comparison to its user."""

    def say(self, line: str) -> None:
        """Shows what goes on, in one line."""
        ...

    def update(self, matrix: Matrix, doing: str) -> None:
        """Shows the runs so far, and what is being run."""
        ...

    def close(self) -> None:
        """Gives the terminal back; safe to call twice."""
        ...


def open_matrix_view(console: Console | None = None) -> MatrixView:
    """Chooses how to show a comparison.

    Args:
        console: where to write; None for standard output.

    Returns:
        A live table when the console is a terminal that can redraw, else plain lines.
    """
    console, can_redraw = open_console(console)
    return LiveMatrixView(console) if can_redraw else PlainMatrixView(console)


class LiveMatrixView:
    """Redraws the table in place, above which lines scroll by."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)
        self._console = console

    def say(self, line: str) -> None:
        """Prints a line above the table."""
        self._console.print(Text(line))

    def update(self, matrix: Matrix, doing: str) -> None:
        """Redraws the table."""
        if not self._live.is_started:
            self._live.start()
        self._live.update(matrix_view(matrix, doing), refresh=True)

    def close(self) -> None:
        """Leaves the last table standing."""
        self._live.stop()


class PlainMatrixView:
    """Writes a line whenever a run's numbers are there.

    Args:
        console: where to write.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ""

    def say(self, line: str) -> None:
        """Writes a line."""
        self._console.print(Text(line), soft_wrap=True)
        self._console.file.flush()

    def update(self, matrix: Matrix, doing: str) -> None:
        """Writes what is being run, once."""
        del matrix
        if doing and doing != self._last:
            self.say(doing)
        self._last = doing

    def close(self) -> None:
        """Has nothing to give back."""


def matrix_view(matrix: Matrix, doing: str = "") -> RenderableType:
    """The runs so far as a table.

    Args:
        doing: What is being run, in a few words.

    Returns:
        Systems in rows and conditions in columns: median milliseconds and slowdown.
    """
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("step ms", no_wrap=True)
    for condition in matrix.conditions:
        table.add_column(condition, justify="right")
    for system, row in matrix.rows():
        table.add_row(system, *map(short_cell, row))
    return Group(table, Text(doing, style="dim")) if doing else table
