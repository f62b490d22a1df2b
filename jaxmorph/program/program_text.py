"""A rank's program as text: one line an instruction, so that one process can hand it to another."""

import re

from jaxmorph.program.instructions import (
    AwaitRoom,
    Buffer,
    BufferKind,
    Fetch,
    Free,
    Instruction,
    Offload,
    RankProgram,
    Receive,
    Reduce,
    Run,
    Send,
    Transfer,
    Update,
)
from jaxmorph.schedule.ops import Op

_HEADING = re.compile(r"rank (\d+) of (\d+), (\d+) microbatches, (\d+) chunks")
_BUFFER = re.compile(r"(?:(\d+)\.)?([a-z-]+)\[(\d+)\]")


def program_text(program: RankProgram) -> str:
    """A program as text that `parse_program` reads back."""
    heading = (
        f"rank {program.rank} of {program.num_ranks}, {program.num_microbatches} microbatches, "
        f"{program.num_chunks} chunks"
    )
    return "\n".join([heading, *map(_line, program.instructions)])


def parse_program(text: str) -> RankProgram:
    """The program that `program_text` wrote.

    Raises:
        ValueError: If a line is no instruction.
    """
    heading, *lines = text.split("\n")
    found = _HEADING.fullmatch(heading)
    if found is None:
        raise ValueError(f"got {heading!r}, expected a line such as 'rank 0 of 4, ...'")
    rank, num_ranks, num_microbatches, num_chunks = map(int, found.groups())
    instructions = tuple(map(_instruction, lines))
    return RankProgram(rank, num_ranks, num_microbatches, instructions, num_chunks)


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
        case ["send", payload, way, ("direct" | "delegated") as route]:
            return Send(Transfer.parse(f"{payload} {way}"), route)
        case ["receive", payload, way, ("direct" | "delegated") as route]:
            return Receive(Transfer.parse(f"{payload} {way}"), route)
        case ["free", buffer]:
            return Free(_buffer(buffer))
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
