"""Where a report goes: a terminal that can redraw, or a stream of lines."""

from io import TextIOWrapper

from rich.console import Console


def open_console(console: Console | None = None) -> tuple[Console, bool]:
    """Makes ready to write a report.

    Args:
        console: where to write; None for standard output.

    Returns:
        The console, and whether it is a terminal that can redraw.
    """
    console = console or Console()
    if isinstance(console.file, TextIOWrapper):  # a loss must not be lost to an ASCII-only stream
        console.file.reconfigure(errors="replace")
    return console, console.is_terminal and not console.is_dumb_terminal
