"""Writes timelines to a file in the format its name asks for."""

import json
from collections.abc import Mapping
from pathlib import Path

from jaxmorph.errors import UserError
from jaxmorph.schedule.costs import NO_LATENCY, Links
from jaxmorph.schedule.draw.picture import save_gantt
from jaxmorph.schedule.draw.text import fitting_width, gantt_text
from jaxmorph.schedule.draw.trace import chrome_trace
from jaxmorph.schedule.replay import LinkModel
from jaxmorph.schedule.timeline import Timeline

FORMATS = (".png", ".svg", ".txt", ".json")


def require_format(path: Path) -> None:
    """Checks that ``save_timelines`` could write a file of this name.

    Raises:
        UserError: An unknown suffix, or a folder that does not exist.
    """
    if path.suffix not in FORMATS:
        raise UserError(
            f"output file: got {path}, expected a name that ends in {', '.join(FORMATS)}"
        )
    if not path.parent.is_dir():
        raise UserError(f"output file: got {path}, but there is no folder {path.parent}")


def save_timelines(
    path: Path,
    timelines: Mapping[str, Timeline],
    links: Links = NO_LATENCY,
    link_model: LinkModel = "latency",
) -> None:
    """Writes a picture (.png, .svg), a text chart (.txt) or a Chrome trace (.json).

    Args:
        timelines: Timelines by name, such as ``planned`` and ``measured``.
        links: State of the links, milliseconds: what a picture shows of messages in flight.

    Raises:
        UserError: An unknown suffix, or a file that cannot be written.
    """
    require_format(path)
    try:
        if path.suffix == ".txt":
            path.write_text(_as_text(timelines), encoding="utf-8")
        elif path.suffix == ".json":
            path.write_text(json.dumps(chrome_trace(timelines)), encoding="utf-8")
        else:
            save_gantt(path, timelines, links, link_model)
    except OSError as error:
        raise UserError(f"output file: cannot write {path}: {error.strerror or error}") from error


def _as_text(timelines: Mapping[str, Timeline]) -> str:
    charts = (
        f"{name}: {timeline.makespan_ms:,.1f} ms, bubble rate {timeline.bubble_rate:.1%}\n"
        f"{gantt_text(timeline, fitting_width(timeline))}\n"
        for name, timeline in timelines.items()
    )
    return "\n".join(charts)
