"""Colours, patterns and fonts of all figures: Okabe and Ito's, safe for the colour-blind."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxmorph.schedule.bubbles import IdleCause
from jaxmorph.schedule.ops import OpKind

COLOURS = {
    OpKind.F: "#56B4E9",
    OpKind.B: "#E69F00",
    OpKind.W: "#009E73",
    OpKind.BW: "#CC79A7",
}

MEANINGS = {
    OpKind.F: "forward",
    OpKind.B: "backward, input",
    OpKind.W: "backward, weights",
    OpKind.BW: "backward",
}


class Shading(NamedTuple):
    """How idle time is filled; patterns distinguish causes without colour."""

    face: str
    hatch: str = ""
    line: str = "#ffffff"


SHADINGS: Mapping[str, Shading] = {
    IdleCause.WARM_UP: Shading("#e3e3e3"),
    IdleCause.DEPENDENCY: Shading("#e4f2fb", "////", "#4a9fd0"),
    IdleCause.TRANSFER: Shading("#F0E442", "..", "#7a7200"),
    IdleCause.BLOCKING: Shading("#8c8c8c", "xxxx", "#333333"),
    IdleCause.COPIES: Shading("#f6dcec", "++++", "#b05c8a"),
    IdleCause.DISPATCH: Shading("#ffffff", "||", "#bbbbbb"),
    IdleCause.COOL_DOWN: Shading("#f1f1f1"),
    IdleCause.OPTIMIZER: Shading("#eadcf1", "---", "#9a6fb5"),
}
"""By cause, in the order of legends."""

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxmorph",  # equal figures are equal files
    "text.parse_math": False,  # a name may contain a $
}
"""For Matplotlib's ``rc_context``."""

_LIGHTEST = 0.45


def shade(kind: OpKind, chunk: int, num_chunks: int) -> str:
    """The colour of an op, such as ``#56b4e9``: its kind's, lighter for later chunks."""
    strength = 1.0 - (1.0 - _LIGHTEST) * chunk / max(1, num_chunks - 1)
    parts = (int(COLOURS[kind][at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - strength * (255 - part)):02x}" for part in parts)
