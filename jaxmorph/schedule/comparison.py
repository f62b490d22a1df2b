"""Answers under each other in one table, as a person reads it in the terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from jaxmorph.schedule.answer import Answer
from jaxmorph.schedule.report import listed

_LISTS = ("", "warm-ups", "peak live")  # columns whose values start at their left
_BETWEEN = "  "


def print_comparison(
    answers: Mapping[str, Answer], refused: Mapping[str, str], console: Console
) -> None:
    """Prints one row for each answer: step, gap to the bound, bubble, and what stages hold.

    Args:
        answers: Answers by the name of their row.
        refused: Why there is no answer, by the name of the row that is missing.
        console: Where to; lines are never cut.
    """
    rows = [{"": name} | _values(answer) for name, answer in answers.items()]
    headings = list(rows[0])
    cells = [headings, *([row[heading] for heading in headings] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for at, line in enumerate(cells):
        style = "dim" if at == 0 else ""
        console.print(Text(_line(line, widths, headings), style=style), soft_wrap=True)
    for name, reason in refused.items():
        console.print(Text(f"{name}: not there, {reason}", style="dim"), soft_wrap=True)


def _values(answer: Answer) -> dict[str, str]:
    jittered = answer.jittered
    with_jitter = {} if jittered is None else {"with jitter": f"{jittered.mean_ms:,.1f} ms"}
    return {
        "makespan": f"{answer.timeline.makespan_ms:,.1f} ms",
        "lower bound": f"{answer.lower_bound_ms:,.1f} ms",
        "gap": f"{answer.gap:.1%}",
        **with_jitter,
        "bubble rate": f"{answer.timeline.bubble_rate:.1%}",
        "warm-ups": listed(answer.schedule.warmup_forwards),
        "peak live": _peak_live(answer),
    }


def _peak_live(answer: Answer) -> str:
    """Microbatches held at most; of a schedule with chunks, the chunks of microbatches."""
    chunks = answer.schedule.num_chunks
    held = listed(answer.schedule.peak_live(answer.limits.live_until))
    return held if chunks == 1 else f"{held} (each 1/{chunks})"


def _line(cells: Sequence[str], widths: Sequence[int], headings: Sequence[str]) -> str:
    columns = zip(cells, widths, headings, strict=True)
    return _BETWEEN.join(
        cell.ljust(width) if heading in _LISTS else cell.rjust(width)
        for cell, width, heading in columns
    ).rstrip()
