"""Prints and draws the answers of `jaxmorph plan`: a chart with numbers, or a table of several."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.text import Text

from jaxmorph.control.answer import Answer
from jaxmorph.report.draw.save import save_timelines
from jaxmorph.report.draw.text import fitting_width, styled_gantt
from jaxmorph.schedule.problem import Problem

_PIPED_WIDTH = 160
_Row = tuple[str, str, str]


def print_answer(answer: Answer, console: Console) -> None:
    """Print the simulated step as a chart of the terminal's width, then its key numbers."""
    timeline = answer.timeline
    width = console.width
    if not console.is_terminal:
        width = min(fitting_width(timeline), _PIPED_WIDTH)
    chart = styled_gantt(timeline, width)
    for part in (_heading(answer), chart, Text(), *_aligned(list(_numbers(answer)))):
        console.print(part, soft_wrap=True)


def _heading(answer: Answer) -> Text:
    schedule = answer.schedule
    sizes = [f"{schedule.num_stages} stages", f"{schedule.num_microbatches} microbatches"]
    if schedule.num_chunks > 1:
        sizes.append(f"{schedule.num_chunks} chunks")
    return Text.assemble((schedule.name, "bold"), f": {', '.join(sizes)}")


def _numbers(answer: Answer) -> Iterator[_Row]:
    """Name, value and note of each number."""
    schedule, limits = answer.schedule, answer.limits
    model = "" if answer.link_model == "latency" else f"with {answer.link_model} links"
    yield "makespan", f"{answer.timeline.makespan_ms:,.1f} ms", model
    yield "lower bound", f"{answer.lower_bound_ms:,.1f} ms", gap_note(answer)
    if answer.jittered is not None:
        mean_ms, p90_ms = answer.jittered
        yield "with jitter", f"{mean_ms:,.1f} ms", f"mean; one step in ten takes over {p90_ms:,.1f}"
    yield "bubble rate", f"{answer.timeline.bubble_rate:.1%}", ""
    yield "warm-ups", listed(schedule.warmup_forwards), "forwards before the first backward"
    held = "microbatches" if schedule.num_chunks == 1 else "chunks of microbatches"
    peaks = schedule.peak_live(limits.live_until)
    yield "peak live", listed(peaks), f"{held} held until {limits.live_until}"
    if answer.peak_stash_bytes is not None:
        yield "peak stash", listed(answer.peak_stash_bytes, thousands=True), "bytes held until W"
    if answer.planning_ms:
        yield "planning", f"{answer.planning_ms:,.1f} ms", ""


def gap_note(answer: Answer) -> str:
    """How far the step is above the lower bound, in words."""
    if answer.gap == 0:
        return "no schedule is faster"
    return f"this is {answer.gap:.1%} above the bound"


def _aligned(rows: Sequence[_Row]) -> list[Text]:
    widest = max(len(value) for _, value, note in rows if note)
    return [
        Text.assemble(f"{name:<13}", (f"{value:<{widest}}", "bold"), (f"  {note}", "dim"))
        if note
        else Text.assemble(f"{name:<13}", (value, "bold"))
        for name, value, note in rows
    ]


def listed(values: Sequence[int], *, thousands: bool = False) -> str:
    """One number per stage; three or more equal ones in a row become one word, such as `5x8`."""
    words: list[str] = []
    for value, run in groupby(values):
        count = len(list(run))
        word = f"{value:,}" if thousands else str(value)
        words.extend([f"{word}x{count}"] if count > 2 else [word] * count)
    return " ".join(words)


def print_comparison(
    answers: Mapping[str, Answer], refused: Mapping[str, str], console: Console
) -> None:
    """Print one row for each answer: step, gap to the bound, bubble, and live microbatches.

    Args:
        answers: By the name of their row.
        refused: The reason for each row that is missing, by its name.
        console: Lines wider than it are not cut.
    """
    rows = [{"": name} | _values(answer) for name, answer in answers.items()]
    columns = []
    for heading in rows[0]:
        cells = [heading, *(row[heading] for row in rows)]
        width = max(map(len, cells))
        to_left = heading in ("", "warm-ups", "peak live")
        columns.append([cell.ljust(width) if to_left else cell.rjust(width) for cell in cells])
    for at, cells in enumerate(zip(*columns, strict=True)):
        line = Text("  ".join(cells).rstrip(), style="" if at else "dim")
        console.print(line, soft_wrap=True)
    for name, reason in refused.items():
        console.print(Text(f"{name}: left out, {reason}", style="dim"), soft_wrap=True)


def _values(answer: Answer) -> dict[str, str]:
    schedule, jittered = answer.schedule, answer.jittered
    with_jitter = {} if jittered is None else {"with jitter": f"{jittered.mean_ms:,.1f} ms"}
    held = listed(schedule.peak_live(answer.limits.live_until))
    each = "" if schedule.num_chunks == 1 else f" (each 1/{schedule.num_chunks})"
    return {
        "makespan": f"{answer.timeline.makespan_ms:,.1f} ms",
        "lower bound": f"{answer.lower_bound_ms:,.1f} ms",
        "gap": f"{answer.gap:.1%}",
        **with_jitter,
        "bubble rate": f"{answer.timeline.bubble_rate:.1%}",
        "warm-ups": listed(schedule.warmup_forwards),
        "peak live": f"{held}{each}",
    }


def save_answers(path: Path, answers: Mapping[str, Answer], problem: Problem | None) -> None:
    """Draw the steps of answers, one panel each (`draw.save_timelines`).

    Args:
        answers: By the name of their panel.
        problem: Its links are drawn with the messages in flight; None if the answers' links differ.

    Raises:
        UserError: An unknown suffix, or a file that cannot be written.
    """
    timelines = {name: answer.timeline for name, answer in answers.items()}
    if problem is None or problem.link_model == "blocking":
        save_timelines(path, timelines)  # a blocking link's delay shows in its transfers
    else:
        save_timelines(path, timelines, problem.links, problem.link_model)
