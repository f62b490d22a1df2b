"""The units of compute a schedule is made of, and their text form.

F runs a microbatch forward, B computes the gradient of the stage's input, W the gradient of its
weights. These are the letters of the zero-bubble papers; torch.distributed.pipelining writes
F, I, W for the same three, and its B is the full backward called BW here.
"""

import re
from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Literal, NamedTuple

LiveUntil = Literal["B", "W"]


class OpKind(StrEnum):
    """What an op computes; BW is a full backward, for schedules that do not split it."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"

    __hash__ = str.__hash__  # Enum.__hash__ runs in Python, and ops are looked up often


_OP_TEXT = re.compile(r"(?:(\d+)\.)?(BW|F|B|W)(\d+)(?:-(\d+))?", re.ASCII)


class Op(NamedTuple):
    """One unit of compute on a stage.

    Attributes:
        chunk: One of its rank's virtual stages, from 0.
        group: How many microbatches a W computes at once, from ``microbatch`` on; 1 for F, B, BW.
    """

    kind: OpKind
    microbatch: int
    chunk: int = 0
    group: int = 1

    @property
    def microbatches(self) -> range:
        """The op's microbatches: one, or all of a W's group."""
        return range(self.microbatch, self.microbatch + self.group)

    @property
    def numbers(self) -> str:
        """Its microbatch, or the first and the last of its group, as text."""
        if self.group == 1:
            return str(self.microbatch)
        return f"{self.microbatch}-{self.microbatches[-1]}"

    def __str__(self) -> str:
        name = f"{self.kind.value}{self.numbers}"
        return f"{self.chunk}.{name}" if self.chunk else name

    @classmethod
    def parse(cls, text: str) -> "Op":
        """Reads an op back from its text form, such as ``F3``, ``BW0``, ``1.W12`` or ``W4-7``.

        Raises:
            ValueError: The text is not an op.
        """
        match = _OP_TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"got {text!r}, expected an op such as F3, B3, W3, BW3 or 1.F3")
        chunk, kind, first, last = match.groups()
        op = cls(OpKind(kind), int(first), int(chunk or 0))
        if last is None:
            return op
        group = int(last) - op.microbatch + 1
        if op.kind is not OpKind.W or group < 2:
            raise ValueError(f"got {text!r}, expected a range only for W, such as W4-7")
        return op._replace(group=group)


def peak_live(order: Sequence[Op], live_until: LiveUntil = "B") -> int:
    """Most microbatches whose stash one stage holds at once when it runs ``order``.

    With V chunks it counts pairs of microbatch and chunk; each holds 1/V of a microbatch.

    Args:
        live_until: The op that frees a microbatch's stash. ``B`` is the paper's count (activations
            from F to B); ``W`` also counts what B leaves for W. BW frees both.
    """
    releasing = (OpKind(live_until), OpKind.BW)
    changes = ((op.kind is OpKind.F) - op.group * (op.kind in releasing) for op in order)
    return max(accumulate(changes, initial=0))
