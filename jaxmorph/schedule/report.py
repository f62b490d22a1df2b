"""An answer as a person reads it in the terminal: a chart, and the numbers under it."""

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from jaxmorph.schedule.answer import Answer
from jaxmorph.schedule.draw.text import fitting_width, styled_gantt

_PIPED_WIDTH = 160


def print_answer(answer: Answer, console: Console) -> None:
    """Prints the simulated step as a chart of the terminal's width, then its key numbers.

    Args:
        answer: What to print.
        console: Where to; colours only where it is a terminal.
    """
    timeline = answer.timeline
    width = console.width
    if not console.is_terminal:
        width = min(fitting_width(timeline), _PIPED_WIDTH)
    chart = styled_gantt(timeline, width)
    for part in (_heading(answer), chart, Text(), *_numbers(answer)):
        console.print(part, soft_wrap=True)


def _heading(answer: Answer) -> Text:
    sizes = f"{answer.schedule.num_stages} stages, {answer.schedule.num_microbatches} microbatches"
    return Text.assemble((answer.schedule.name, "bold"), f": {sizes}")


def _numbers(answer: Answer) -> list[Text]:
    makespan_ms, bound_ms = answer.timeline.makespan_ms, answer.lower_bound_ms
    above = makespan_ms / bound_ms - 1 if bound_ms else 0.0
    distance = "no schedule is faster" if above == 0 else f"this is {above:.1%} above the bound"
    schedule, live_until = answer.schedule, answer.live_until
    rows = {
        "makespan": (f"{makespan_ms:,.1f} ms", ""),
        "lower bound": (f"{bound_ms:,.1f} ms", distance),
        "bubble rate": (f"{answer.timeline.bubble_rate:.1%}", ""),
        "warm-ups": (_listed(schedule.warmup_forwards), "forwards before the first backward"),
        "peak live": (
            _listed(schedule.peak_live(live_until)),
            f"microbatches held until {live_until}",
        ),
        "planning": (f"{answer.planning_ms:,.1f} ms", ""),
    }
    widest = max(len(value) for value, _ in rows.values())
    return [
        Text.assemble(f"{name:<13}", (f"{value:<{widest}}", "bold"), (f"  {note}", "dim"))
        if note
        else Text.assemble(f"{name:<13}", (value, "bold"))
        for name, (value, note) in rows.items()
    ]


def _listed(values: Sequence[int]) -> str:
    """One number per stage; a run of three or more equal ones is drawn together, as in ``5x8``."""
    words: list[str] = []
    for value, run in groupby(values):
        count = len(list(run))
        words.extend([f"{value}x{count}"] if count > 2 else [str(value)] * count)
    return " ".join(words)
