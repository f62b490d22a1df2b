"""What all pages share: the document, its style, and the patterns that pictures fill with."""

from collections.abc import Iterable
from functools import cache
from importlib import metadata, resources

from jaxmorph.reporting.page.elements import Html, element, joined
from jaxmorph.schedule.draw.palette import COLOURS

_PATTERNS = (
    ("dependency", "M0 8L8 0M-2 2L2 -2M6 10L10 6"),
    ("transfer", "M2 2h.01M6 6h.01"),
    ("blocking", "M0 0L8 8M8 0L0 8"),
    ("copies", "M0 4H8M4 0V8"),
    ("dispatch", "M2 0V8M6 0V8"),
    ("optimizer", "M0 2H8M0 6H8"),
)


def page(title: str, sections: Iterable[Html | None], contents: Iterable[tuple[str, str]]) -> str:
    """A whole document.

    Args:
        contents: Names and `id`s of the sections that the reader may jump to.
    """
    links = (element("a", name, href=f"#{target}") for name, target in contents)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(_style())),
    )
    body = element(
        "body",
        _patterns(),
        element("header", element("h1", title), element("nav", *links, aria_label="Sections")),
        element("main", *(section for section in sections if section is not None)),
        element("footer", f"Written by jaxmorph {metadata.version('jaxmorph')}."),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


@cache
def _style() -> str:
    """The style sheet, with the colours of ops that all of jaxmorph's pictures have."""
    sheet = resources.files("jaxmorph.reporting.page").joinpath("style.css")
    colours = "".join(f"--op-{kind}:{colour};" for kind, colour in COLOURS.items())
    return f":root{{{colours}}}\n{sheet.read_text(encoding='utf-8')}"


def _patterns() -> Html:
    """Fills that tell causes apart without colour; the style colours them."""
    patterns = (
        element(
            "pattern",
            element("rect", width=8, height=8, class_=f"face-{name}"),
            element("path", d=lines, class_=f"lines-{name}"),
            id=f"pattern-{name}",
            width=8,
            height=8,
            patternUnits="userSpaceOnUse",
        )
        for name, lines in _PATTERNS
    )
    defined = element("defs", joined(patterns))
    return element("svg", defined, width=0, height=0, class_="patterns", aria_hidden="true")
