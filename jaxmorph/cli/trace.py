"""``jaxmorph trace``: draws random delays of links, as a table for ``emulation.trace``."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from jaxmorph.emulation.delay_traces import (
    LONG_EVENTS,
    REGIMES,
    SHORT_EVENTS,
    DelayTrace,
    draw_events,
    draw_regime,
    to_csv,
)
from jaxmorph.emulation.link_trace import require_few_changes, require_links_of
from jaxmorph.errors import UserError
from jaxmorph.placement import Placement
from jaxmorph.records import Link

EVENTS = {"events": LONG_EVENTS, "short-events": SHORT_EVENTS}
KINDS = (*REGIMES, *EVENTS)
_STAGES = 4
_SHORTEST_S, _LONGEST_S = 0.1, 3600.0


def trace(
    kind: Annotated[str, typer.Argument(metavar="REGIME", help=f"One of {', '.join(KINDS)}.")],
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same delays.")] = 0,
    stages: Annotated[
        int | None,
        typer.Option(
            min=2,
            show_default=str(_STAGES),
            help="Pipeline stages; all links between neighbours get delays.",
        ),
    ] = None,
    links: Annotated[
        str | None, typer.Option(help="Only these links get delays, such as '0-1 2-3'.")
    ] = None,
    duration_s: Annotated[
        float, typer.Option(help="Length in seconds, for regimes by time.")
    ] = 120.0,
    steps: Annotated[
        int,
        typer.Option(min=1, max=1_000_000, help="Length in steps, for events, which are by step."),
    ] = 1200,
    replicas: Annotated[
        int, typer.Option(min=1, max=64, help="Replicas of the pipeline, each with its own delays.")
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(help="The CSV file to write; default: print it.")
    ] = None,
) -> int:
    """Draw random delays of links that change during a run."""
    _require_duration(duration_s)
    named = _links(links, stages)
    drawn = [_draw(kind, named, duration_s, steps, seed, replica) for replica in range(replicas)]
    option = "--steps" if kind in EVENTS else "--duration-s"
    for each in drawn:
        require_few_changes((link for change in each.changes for link in change.links), option)
    if out is None:
        typer.echo(to_csv(drawn), nl=False)
        return 0
    try:
        out.write_text(to_csv(drawn), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: {out}: {error.strerror or error}") from error
    typer.echo(f"wrote {out}: {_summary(drawn)}")
    return 0


def _draw(
    kind: str, links: tuple[Link, ...], duration_s: float, steps: int, seed: int, replica: int
) -> DelayTrace:
    if kind in EVENTS:
        return draw_events(links, steps, seed, EVENTS[kind], replica)
    if kind in REGIMES:
        return draw_regime(kind, links, duration_s, seed, replica)
    raise UserError(f"REGIME: got {kind!r}, expected one of {', '.join(KINDS)}")


def _require_duration(duration_s: float) -> None:
    if not _SHORTEST_S <= duration_s <= _LONGEST_S:  # NaN fails too
        expected = f"a number from {_SHORTEST_S:g} to {_LONGEST_S:g}"
        raise UserError(f"--duration-s: got {duration_s:g}, expected {expected}")


def _links(text: str | None, stages: int | None) -> tuple[Link, ...]:
    if text is None:
        return Placement(stages or _STAGES).links
    try:
        links = tuple(map(Link.parse, text.split()))
    except ValueError as error:
        raise UserError(f"--links: {error}") from error
    if not links or len(set(links)) < len(links):
        raise UserError(f"--links: got {text!r}, expected each link once, such as '0-1 2-3'")
    if stages is not None:
        require_links_of(stages, links, "--links")
    return links


def _summary(drawn: Sequence[DelayTrace]) -> str:
    """The number of changes, and percentiles of the delays, in words."""
    changes = [(index, change) for index, trace in enumerate(drawn) for change in trace.changes]
    of_links = Counter((index, link) for index, change in changes for link in change.links)
    delays_ms = [change.latency_ms for _, change in changes if change.latency_ms > 0]
    if not delays_ms:
        return "no delays"
    p50, p99 = np.percentile(delays_ms, (50, 99))
    return (
        f"{of_links.total()} changes of {len(of_links)} links; delays above 0 have a median of "
        f"{p50:.1f}, a mean of {np.mean(delays_ms):.1f} and a 99th percentile of {p99:.1f} ms"
    )
