"""The colours of ops and bubbles: Okabe and Ito's, which colour-blind readers can tell apart."""

from typing import NamedTuple

from jaxmorph.schedule.bubbles import BubbleCause
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
    """How a bubble is filled; the pattern tells causes apart without colour."""

    face: str
    hatch: str = ""
    line: str = "#ffffff"


SHADINGS = {
    BubbleCause.WARM_UP: Shading("#e3e3e3"),
    BubbleCause.FORWARD: Shading("#e4f2fb", "////", "#4a9fd0"),
    BubbleCause.BACKWARD: Shading("#fdf0d8", "\\\\\\\\", "#c98a00"),
    BubbleCause.LINK: Shading("#F0E442", "....", "#7a7200"),
    BubbleCause.BLOCKING: Shading("#8c8c8c", "xxxx", "#333333"),
    BubbleCause.COPIES: Shading("#f6dcec", "++++", "#b05c8a"),
    BubbleCause.COOL_DOWN: Shading("#f1f1f1"),
    BubbleCause.OTHER: Shading("#ffffff", "||", "#bbbbbb"),
}

_LIGHTEST = 0.45


def shade(kind: OpKind, chunk: int, num_chunks: int) -> str:
    """The colour of an op: the kind's, and lighter the later the chunk.

    Args:
        chunk: Its virtual stage on the rank.
        num_chunks: Virtual stages a rank runs.

    Returns:
        A colour such as ``#56b4e9``.
    """
    strength = 1.0 - (1.0 - _LIGHTEST) * chunk / max(1, num_chunks - 1)
    parts = (int(COLOURS[kind][at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - strength * (255 - part)):02x}" for part in parts)
