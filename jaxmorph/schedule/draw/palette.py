"""The colours of the ops: Okabe and Ito's, which colour-blind readers can tell apart."""

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
