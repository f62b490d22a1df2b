"""The instructions of one rank for one step: run an op, send, receive, offload, reduce, update.

An instruction names buffers, never arrays; `dataflow` derives which buffers an instruction reads
and writes, and after which instruction a buffer is freed. `instructions_text` is the form that
processes exchange, with one line per instruction.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from jaxmorph.placement import Placement, PlacementKind
from jaxmorph.records import Link, Route
from jaxmorph.schedule.ops import Op


class BufferKind(StrEnum):
    """The values a rank holds between instructions."""

    INPUT = "input"
    OUTPUT = "output"
    STASH = "stash"
    OUTPUT_GRADIENT = "output-gradient"
    INPUT_GRADIENT = "input-gradient"
    WEIGHT_STASH = "weight-stash"
    TIED_GRADIENT = "tied-gradient"

    __hash__ = str.__hash__  # as `OpKind`'s


class Buffer(NamedTuple):
    """One value of one microbatch of one of a rank's chunks; printed as ``1.stash[3]``."""

    kind: BufferKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return _of_chunk(self.chunk, f"{self.kind}[{self.microbatch}]")


class Payload(StrEnum):
    """What a transfer carries: an activation downstream, a gradient upstream, a tied gradient."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    TIED = "tied"

    __hash__ = str.__hash__  # as `OpKind`'s


# An enumeration's attributes are slow to look up.
_TIED = Payload.TIED
_TRANSFER_TEXT = re.compile(r"(?:(\d+)\.)?(activation|gradient|tied)\[(\d+)\] (\d+)>(\d+)")


class Transfer(NamedTuple):
    """The identity of a message within a step and an epoch.

    `microbatch` is the tied parameter's index if the payload is a tied gradient; `chunk` is the
    source's chunk.
    """

    payload: Payload
    source: int
    destination: int
    microbatch: int
    chunk: int = 0

    @property
    def link(self) -> Link:
        """The link between its two ranks."""
        return Link.of(self.source, self.destination)

    def __str__(self) -> str:
        payload = _of_chunk(self.chunk, f"{self.payload}[{self.microbatch}]")
        return f"{payload} {self.source}>{self.destination}"

    @classmethod
    def parse(cls, text: str) -> "Transfer":
        """Reads a transfer back from `str(transfer)`.

        Raises:
            ValueError: The text is not of the form `activation[3] 0>1`.
        """
        found = _TRANSFER_TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"got {text!r}, expected a transfer such as 'activation[3] 0>1'")
        chunk, payload, microbatch, source, destination = found.groups()
        ends = (int(source), int(destination))
        return cls(Payload(payload), *ends, int(microbatch), int(chunk or 0))


def _of_chunk(chunk: int, text: str) -> str:
    return f"{chunk}.{text}" if chunk else text


class Channel(NamedTuple):
    """One kind of payload in one direction of a link; each tied parameter has its own channel.

    On two stages with chunks, gradients and activations that wrap around share a direction, but not
    a channel.
    """

    payload: Payload
    source: int
    destination: int
    tied_index: int = 0

    @property
    def link(self) -> Link:
        """The link between its two ranks."""
        return Link.of(self.source, self.destination)

    def __str__(self) -> str:
        index = f"[{self.tied_index}]" if self.payload is Payload.TIED else ""
        return f"{self.payload}{index} {self.source}>{self.destination}"


def channel_of(transfer: Transfer) -> Channel:
    """The channel of a transfer."""
    index = transfer.microbatch if transfer.payload is _TIED else 0
    return Channel(transfer.payload, transfer.source, transfer.destination, index)


@dataclass(frozen=True, slots=True)
class Run:
    """Runs the op's compiled program."""

    op: Op

    def __str__(self) -> str:
        return f"run {self.op}"


@dataclass(frozen=True, slots=True)
class Send:
    """Sends a buffer; on a direct route the queue waits until the peer receives."""

    transfer: Transfer
    route: Route = "direct"

    @property
    def peer(self) -> int:
        """The rank at the other end."""
        return self.transfer.destination

    @property
    def other_end(self) -> "Receive":
        """The instruction of the rank at the other end."""
        return Receive(self.transfer, self.route)

    def __str__(self) -> str:
        return f"send {self.transfer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Waits for a message and stores it as a buffer."""

    transfer: Transfer
    route: Route = "direct"

    @property
    def peer(self) -> int:
        """The rank at the other end."""
        return self.transfer.source

    @property
    def other_end(self) -> Send:
        """The instruction of the rank at the other end."""
        return Send(self.transfer, self.route)

    def __str__(self) -> str:
        return f"receive {self.transfer}"


@dataclass(frozen=True, slots=True)
class SendReceive:
    """A pair: sends a buffer and receives a message of the same link, both in one program.

    The queue waits until the peer has reached the pair, then once for both messages.
    """

    sent: Transfer
    received: Transfer
    route: ClassVar[Literal["direct"]] = "direct"

    @property
    def peer(self) -> int:
        """The rank at the other end."""
        return self.sent.destination

    @property
    def other_end(self) -> "SendReceive":
        """The instruction of the rank at the other end."""
        return SendReceive(self.received, self.sent)

    def __str__(self) -> str:
        return f"send {self.sent} and receive {self.received}"


Move: TypeAlias = Send | Receive | SendReceive
"""Moves one message, or a pair of them, over a link."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Starts to copy a stash to host memory, which frees its place on the device when it ends.

    A rank's offloads end in the order of its instructions.
    """

    buffer: Buffer

    def __str__(self) -> str:
        return f"offload {self.buffer}"


@dataclass(frozen=True, slots=True)
class Fetch:
    """Starts to copy a stash back while ops run; the op that reads it waits for the copy.

    Attributes:
        after: The stash whose offload must end first to make room, if any.
    """

    buffer: Buffer
    after: Buffer | None = None

    def __str__(self) -> str:
        return f"fetch {self.buffer}" + (f" after {self.after}" if self.after else "")


@dataclass(frozen=True, slots=True)
class AwaitRoom:
    """Waits until a stash's offload has ended: what follows needs its place."""

    buffer: Buffer

    def __str__(self) -> str:
        return f"await room of {self.buffer}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sums the gradients of a tied parameter's two copies, in stage order on both ends.

    Attributes:
        index: The tied parameter's index.
        buffer: The gradient of the peer's copy; None if one rank holds both copies.
    """

    index: int
    buffer: Buffer | None

    def __str__(self) -> str:
        return f"reduce tied {self.index}"


@dataclass(frozen=True, slots=True)
class Update:
    """Exchanges the step's scalars over the host network and applies the optimizer."""

    def __str__(self) -> str:
        return "update"


Instruction: TypeAlias = Run | Move | Offload | Fetch | AwaitRoom | Reduce | Update


@dataclass(frozen=True)
class RankInstructions:
    """One rank's instructions for one step, in the order its queue runs them."""

    rank: int
    num_ranks: int
    num_microbatches: int
    instructions: tuple[Instruction, ...]
    num_chunks: int = 1
    placement_kind: PlacementKind = "wrap"

    @cached_property
    def placement(self) -> Placement:
        """Which rank of the pipeline runs which virtual stage."""
        return Placement(self.num_ranks, self.num_chunks, self.placement_kind)

    def ops(self) -> Iterator[Op]:
        """The ops alone, in order."""
        return (step.op for step in self.instructions if isinstance(step, Run))


_HEADING = re.compile(r"rank (\d+) of (\d+), (\d+) microbatches, (\d+) chunks( in a v)?")
_BUFFER = re.compile(r"(?:(\d+)\.)?([a-z-]+)\[(\d+)\]")


def instructions_text(program: RankInstructions) -> str:
    """The text of a rank's instructions, which `parse_instructions` reads back."""
    heading = (
        f"rank {program.rank} of {program.num_ranks}, {program.num_microbatches} microbatches, "
        f"{program.num_chunks} chunks"
    )
    if program.placement_kind == "v":
        heading += " in a v"
    return "\n".join([heading, *map(_line, program.instructions)])


def parse_instructions(text: str) -> RankInstructions:
    """Reads instructions back from `instructions_text`.

    Raises:
        ValueError: A line is not an instruction.
    """
    heading, *lines = text.split("\n")
    found = _HEADING.fullmatch(heading)
    if found is None:
        raise ValueError(f"got {heading!r}, expected a line such as 'rank 0 of 4, ...'")
    *sizes, in_a_v = found.groups()
    rank, num_ranks, num_microbatches, num_chunks = map(int, sizes)
    instructions = tuple(map(_instruction, lines))
    return RankInstructions(
        rank, num_ranks, num_microbatches, instructions, num_chunks, "v" if in_a_v else "wrap"
    )


def _line(step: Instruction) -> str:
    match step:
        case Send(_, route) | Receive(_, route):
            return f"{step} {route}"
        case Reduce(index, buffer):
            return f"reduce {index}" if buffer is None else f"reduce {index} {buffer}"
        case _:
            return str(step)


def _instruction(line: str) -> Instruction:
    match line.split(" "):
        case ["run", op]:
            return Run(Op.parse(op))
        case ["send", payload, ranks, ("direct" | "delegated") as route]:
            return Send(Transfer.parse(f"{payload} {ranks}"), route)
        case ["receive", payload, ranks, ("direct" | "delegated") as route]:
            return Receive(Transfer.parse(f"{payload} {ranks}"), route)
        case ["send", sent, to_peer, "and", "receive", received, from_peer]:
            ends = f"{sent} {to_peer}", f"{received} {from_peer}"
            return SendReceive(*map(Transfer.parse, ends))
        case ["reduce", index]:
            return Reduce(int(index), None)
        case ["reduce", index, buffer]:
            return Reduce(int(index), _buffer(buffer))
        case ["update"]:
            return Update()
    return _copy_instruction(line)


def _copy_instruction(line: str) -> Instruction:
    match line.split(" "):
        case ["offload", buffer]:
            return Offload(_buffer(buffer))
        case ["fetch", buffer]:
            return Fetch(_buffer(buffer))
        case ["fetch", buffer, "after", other]:
            return Fetch(_buffer(buffer), _buffer(other))
        case ["await", "room", "of", buffer]:
            return AwaitRoom(_buffer(buffer))
    raise ValueError(f"got {line!r}, expected an instruction such as 'run F3'")


def _buffer(text: str) -> Buffer:
    found = _BUFFER.fullmatch(text)
    if found is None:
        raise ValueError(f"got {text!r}, expected a buffer such as 'stash[3]'")
    chunk, kind, microbatch = found.groups()
    return Buffer(BufferKind(kind), int(microbatch), int(chunk or 0))
