"""Renders templates, with all text escaped, and Matplotlib figures as inline SVG."""

import re
from collections.abc import Callable
from functools import cache
from io import StringIO
from typing import Any
from warnings import catch_warnings, filterwarnings

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.figure import Figure

import jaxmorph
from jaxmorph.report.draw.palette import STYLE

UNKNOWN = "-"
"""Shown for a number that isn't known."""

_PIXELS_PER_INCH = 96
# Parts of Matplotlib's SVG that a page doesn't need: metadata, styles, ids, fonts, white space.
_NOT_FOR_PAGES = re.compile(
    r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>|(?<=>)\s+(?=<)"
    r'| id="[A-Za-z.]+\d?_\d+"| target="_blank"| transform="rotate\(-0 [^"]*"'
    r"| font-family: 'DejaVu Sans';",
    re.DOTALL,
)
_PLACES = re.compile(r' (?:d|x|y)="[^"]*"')
_PATTERN = re.compile(r"<pattern.*?</pattern>", re.DOTALL)


def render(template: str, **values: Any) -> str:
    """A whole document, from one of `templates/`."""
    # A pattern inside a folded section is hidden from charts outside of it. So the patterns of all
    # charts stand once, at the top of the page.
    page = _environment().get_template(template).render(values)
    patterns = "".join(dict.fromkeys(_PATTERN.findall(page)))
    hidden = f'<svg width="0" height="0" class="patterns" aria-hidden="true">{patterns}</svg>'
    return _PATTERN.sub("", page).replace("<body>", f"<body>{hidden}", 1)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("jaxmorph.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(UNKNOWN=UNKNOWN, version=jaxmorph.__version__)
    return environment


def inline_svg(label: str, draw: Callable[[], Figure]) -> Markup:
    """A figure as an SVG element, whose colours the style sheet can replace.

    Args:
        label: What it shows, for screen readers.
        draw: Makes the figure, within `palette.STYLE`.
    """
    written = StringIO()
    with rc_context(STYLE), catch_warnings():
        filterwarnings("ignore", "Glyph")  # the browser may have a glyph that this machine lacks
        figure = draw()
        figure.savefig(written, format="svg", transparent=True)
    start, inner = written.getvalue().partition("<svg")[2].split(">", 1)
    view = re.findall(r'viewBox="[^"]*"', start)[0]
    inner = _NOT_FOR_PAGES.sub("", inner)
    inner = _PLACES.sub(lambda found: re.sub(r"(\.\d)\d+", r"\1", found[0]), inner)
    inner = re.sub(r'fill="(#[0-9a-f]{6})"', r'style="fill: \1"', inner)
    # In dark mode the style sheet sets `--c-222222`, which takes the place of #222222.
    inner = re.sub(r"(?<=: )#([0-9a-f]{6})\b", r"var(--c-\1, #\1)", inner)
    width = round(_PIXELS_PER_INCH * figure.get_figwidth())
    return Markup(
        f'<svg class="chart" {view} role="img" aria-label="{escape(label)}" '
        f'style="--width: {width}px">{inner}'
    )


def milliseconds(value: float | None, digits: int = 1) -> str:
    """Milliseconds with their unit; a dash for None."""
    return UNKNOWN if value is None else f"{value:,.{digits}f} ms"
