"""What one rank does in one step, as data: run an op, send, receive, free, reduce, update.

An instruction names buffers, never arrays: which values an op reads and writes follows from the op
alone (`reads`, `writes`), so the executor, the checker and the pass that frees buffers agree by
construction.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias

from jaxmorph.schedule.costs import Link
from jaxmorph.schedule.ops import Op, OpKind

Route: TypeAlias = Literal["direct", "delegated"]
Routes: TypeAlias = Mapping[Link, Route]


class BufferKind(StrEnum):
    """The values a rank holds between instructions."""

    INPUT = "input"
    OUTPUT = "output"
    STASH = "stash"
    OUTPUT_GRADIENT = "output-gradient"
    INPUT_GRADIENT = "input-gradient"
    WEIGHT_STASH = "weight-stash"
    TIED_GRADIENT = "tied-gradient"


class Buffer(NamedTuple):
    """One value of one microbatch on one rank."""

    kind: BufferKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}[{self.microbatch}]"


class Payload(StrEnum):
    """What a transfer carries: an activation downstream, a gradient upstream, a tied gradient."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    TIED = "tied"


_TRANSFER_TEXT = re.compile(r"(activation|gradient|tied)\[(\d+)\] (\d+)>(\d+)")


class Transfer(NamedTuple):
    """One message of a step; with the epoch and the step number it identifies a message for ever.

    `microbatch` is the index of the tied parameter where the payload is a tied gradient.
    """

    payload: Payload
    source: int
    destination: int
    microbatch: int

    @property
    def link(self) -> Link:
        """The link the message travels, whatever its direction."""
        return Link(min(self.source, self.destination), max(self.source, self.destination))

    def __str__(self) -> str:
        return f"{self.payload}[{self.microbatch}] {self.source}>{self.destination}"

    @classmethod
    def parse(cls, text: str) -> "Transfer":
        """The transfer that `str` wrote.

        Raises:
            ValueError: If the text is not of the form `activation[3] 0>1`.
        """
        found = _TRANSFER_TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"got {text!r}, expected a transfer such as 'activation[3] 0>1'")
        payload, microbatch, source, destination = found.groups()
        return cls(Payload(payload), int(source), int(destination), int(microbatch))


@dataclass(frozen=True)
class Run:
    """Run the op's compiled program."""

    op: Op

    def __str__(self) -> str:
        return f"run {self.op}"


@dataclass(frozen=True)
class Send:
    """Hand a buffer to the route; on a direct route the queue waits until the peer receives."""

    transfer: Transfer
    route: Route = "direct"

    def __str__(self) -> str:
        return f"send {self.transfer}"


@dataclass(frozen=True)
class Receive:
    """Wait for a message and keep it as a buffer."""

    transfer: Transfer
    route: Route = "direct"

    def __str__(self) -> str:
        return f"receive {self.transfer}"


@dataclass(frozen=True)
class Free:
    """Drop a buffer: nothing after this reads it."""

    buffer: Buffer

    def __str__(self) -> str:
        return f"free {self.buffer}"


@dataclass(frozen=True)
class Reduce:
    """Make both copies' gradients of a tied parameter their sum, in stage order on both ends.

    Attributes:
        index: Which of the model's tied parameters.
        buffer: The gradient of the peer's copy; None where one rank holds both copies.
    """

    index: int
    buffer: Buffer | None

    def __str__(self) -> str:
        return f"reduce tied {self.index}"


@dataclass(frozen=True)
class Update:
    """Exchange the step's scalars over the host network and apply the optimizer."""

    def __str__(self) -> str:
        return "update"


Instruction: TypeAlias = Run | Send | Receive | Free | Reduce | Update


@dataclass(frozen=True)
class RankProgram:
    """One rank's instructions for one step, in the order its queue runs them."""

    rank: int
    num_ranks: int
    num_microbatches: int
    instructions: tuple[Instruction, ...]

    def __str__(self) -> str:
        lines = (str(instruction) for instruction in self.instructions)
        return f"rank {self.rank} of {self.num_ranks}\n  " + "\n  ".join(lines)

    def ops(self) -> Iterator[Op]:
        """The ops alone, in order."""
        return (step.op for step in self.instructions if isinstance(step, Run))


def reads(instruction: Instruction, rank: int, num_ranks: int) -> tuple[Buffer, ...]:
    """The buffers an instruction needs.

    The first stage's F reads tokens and the last stage's B starts from the loss weight: both come
    from the host, not from a buffer.
    """
    match instruction:
        case Run(op):
            return _op_reads(op, is_first=rank == 0, is_last=rank == num_ranks - 1)
        case Send(transfer) if transfer.payload is not Payload.TIED:
            return (sent_buffer(transfer),)
        case Free(buffer):
            return (buffer,)
        case Reduce(_, buffer):
            return () if buffer is None else (buffer,)
        case _:
            return ()


def writes(instruction: Instruction, rank: int, num_ranks: int) -> tuple[Buffer, ...]:
    """The buffers an instruction makes."""
    match instruction:
        case Run(op):
            return _op_writes(op, is_first=rank == 0, is_last=rank == num_ranks - 1)
        case Receive(transfer):
            return (received_buffer(transfer),)
        case _:
            return ()


def _op_reads(op: Op, *, is_first: bool, is_last: bool) -> tuple[Buffer, ...]:
    microbatch = op.microbatch
    if op.kind is OpKind.F:
        return () if is_first else (Buffer(BufferKind.INPUT, microbatch),)
    if op.kind is OpKind.W:
        return (Buffer(BufferKind.WEIGHT_STASH, microbatch),)
    stash = Buffer(BufferKind.STASH, microbatch)
    return (stash,) if is_last else (stash, Buffer(BufferKind.OUTPUT_GRADIENT, microbatch))


def _op_writes(op: Op, *, is_first: bool, is_last: bool) -> tuple[Buffer, ...]:
    microbatch = op.microbatch
    made: list[Buffer] = []
    if op.kind is OpKind.F:
        made.append(Buffer(BufferKind.STASH, microbatch))
        if not is_last:
            made.append(Buffer(BufferKind.OUTPUT, microbatch))
    if op.kind in (OpKind.B, OpKind.BW) and not is_first:
        made.append(Buffer(BufferKind.INPUT_GRADIENT, microbatch))
    if op.kind is OpKind.B:
        made.append(Buffer(BufferKind.WEIGHT_STASH, microbatch))
    return tuple(made)


_SENT = {Payload.ACTIVATION: BufferKind.OUTPUT, Payload.GRADIENT: BufferKind.INPUT_GRADIENT}
_RECEIVED = {
    Payload.ACTIVATION: BufferKind.INPUT,
    Payload.GRADIENT: BufferKind.OUTPUT_GRADIENT,
    Payload.TIED: BufferKind.TIED_GRADIENT,
}


def sent_buffer(transfer: Transfer) -> Buffer:
    """The buffer whose value an activation or a gradient transfer carries."""
    return Buffer(_SENT[transfer.payload], transfer.microbatch)


def received_buffer(transfer: Transfer) -> Buffer:
    """The buffer that a transfer fills on its destination."""
    return Buffer(_RECEIVED[transfer.payload], transfer.microbatch)


def output_transfer(op: Op, rank: int, num_ranks: int) -> Transfer | None:
    """The message that an op's result becomes, or None where it stays on the rank.

    The op that waits for it is the same op on the destination: F3 makes the next stage's F3 ready,
    B3 the previous stage's B3.
    """
    if op.kind is OpKind.F and rank < num_ranks - 1:
        return Transfer(Payload.ACTIVATION, rank, rank + 1, op.microbatch)
    if op.kind in (OpKind.B, OpKind.BW) and rank > 0:
        return Transfer(Payload.GRADIENT, rank, rank - 1, op.microbatch)
    return None
