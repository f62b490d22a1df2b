"""HTML and SVG as text, in which whatever isn't known to be HTML is escaped."""

from collections.abc import Iterable
from html import escape

_WITHOUT_CONTENT = frozenset({"path", "rect", "line", "meta", "link", "col"})


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, /, *children: str | None, **attributes: str | float | None) -> Html:
    """An element of HTML or SVG.

    Args:
        children: What it contains: `Html` as it is, other text escaped; None: nothing.
        attributes: By their names, `_` for `-`, a last `_` left out; None: absent.
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if tag in _WITHOUT_CONTENT:
        return Html(f"<{tag}{told}/>")
    return Html(f"<{tag}{told}>{joined(children)}</{tag}>")


def joined(parts: Iterable[str | None]) -> Html:
    """Parts side by side.

    Args:
        parts: As the children of an `element`.
    """
    return Html("".join(_content(part) for part in parts if part is not None))


def number(value: float) -> str:
    """A coordinate to a tenth, as short as it can be written."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _content(part: str) -> str:
    return part if isinstance(part, Html) else escape(str(part), quote=False)


def _value(value: str | float) -> str:
    return number(value) if isinstance(value, float) else escape(str(value))
