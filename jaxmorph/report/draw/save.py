"""Saves timelines as a figure, a text chart or a Chrome trace, by the file's suffix."""

import json
from collections.abc import Mapping
from pathlib import Path

from jaxmorph.errors import UserError
from jaxmorph.report.draw.palette import STYLE
from jaxmorph.report.draw.text import fitting_width, gantt_text
from jaxmorph.report.draw.trace import chrome_trace
from jaxmorph.schedule.bubbles import find_bubbles
from jaxmorph.schedule.costs import NO_LATENCY, Links
from jaxmorph.schedule.replay import LinkModel
from jaxmorph.schedule.timeline import Timeline

FORMATS = (".png", ".svg", ".txt", ".json")


def require_format(path: Path) -> None:
    """Check a name for ``save_timelines``.

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
    """Write a figure (.png, .svg), a text chart (.txt) or a Chrome trace (.json).

    Args:
        timelines: At least one, by names such as ``planned`` and ``measured``.
        links: The delays of the messages in flight that a figure shows.

    Raises:
        UserError: An unknown suffix, or a file that cannot be written.
    """
    require_format(path)
    try:
        if path.suffix == ".txt":
            charts = (
                f"{_title(name, timeline)}\n{gantt_text(timeline, fitting_width(timeline))}\n"
                for name, timeline in timelines.items()
            )
            path.write_text("\n".join(charts), encoding="utf-8")
        elif path.suffix == ".json":
            path.write_text(json.dumps(chrome_trace(timelines)), encoding="utf-8")
        else:
            _save_picture(path, timelines, links, link_model)
    except OSError as error:
        raise UserError(f"output file: cannot write {path}: {error.strerror or error}") from error


def _save_picture(
    path: Path, timelines: Mapping[str, Timeline], links: Links, link_model: LinkModel
) -> None:
    # Imported here: the import of Matplotlib takes longer than most planning.
    from matplotlib import rc_context

    from jaxmorph.report.draw.gantt import Panel, gantt_figure

    panels = [
        Panel(_title(name, timeline), timeline, find_bubbles(timeline), timeline.makespan_ms)
        for name, timeline in timelines.items()
    ]
    with rc_context(STYLE):
        figure = gantt_figure(panels, links, link_model)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _title(name: str, timeline: Timeline) -> str:
    return f"{name}: {timeline.makespan_ms:,.1f} ms, bubble rate {timeline.bubble_rate:.1%}"
