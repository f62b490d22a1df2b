"""Which buffers each instruction reads and makes, and which message an op's result becomes.

This follows from the instruction and its place alone, so the executor, the checker and the pass
that frees buffers agree by construction.
"""

from functools import lru_cache

from jaxmorph.program.instructions import (
    Buffer,
    BufferKind,
    Fetch,
    Free,
    Instruction,
    Offload,
    Payload,
    Pipeline,
    Place,
    Receive,
    Reduce,
    Run,
    Send,
    Transfer,
)
from jaxmorph.schedule.ops import Op, OpKind

# Plans of one run are made of the same ops, and lowering asks about each many times over.
_remembered = lru_cache(maxsize=1 << 14)


def reads(instruction: Instruction, rank: int, pipeline: Pipeline) -> tuple[Buffer, ...]:
    """The buffers an instruction needs.

    F of the first virtual stage reads tokens and B of the last one starts from the loss weight:
    both come from the host, not from a buffer.
    """
    match instruction:
        case Run(op):
            return _op_reads(op, rank, pipeline)
        case Send(transfer) if transfer.payload is not Payload.TIED:
            return (sent_buffer(transfer),)
        case Free(buffer) | Offload(buffer) | Fetch(buffer):
            return (buffer,)
        case Reduce(_, buffer):
            return () if buffer is None else (buffer,)
        case _:
            return ()


def writes(instruction: Instruction, rank: int, pipeline: Pipeline) -> tuple[Buffer, ...]:
    """The buffers an instruction makes."""
    match instruction:
        case Run(op):
            return _op_writes(op, rank, pipeline)
        case Receive(transfer):
            return (received_buffer(transfer),)
        case _:
            return ()


@_remembered
def _op_reads(op: Op, rank: int, pipeline: Pipeline) -> tuple[Buffer, ...]:
    place, microbatch, chunk = Place(rank, op.chunk), op.microbatch, op.chunk
    if op.kind is OpKind.F:
        is_first = pipeline.before(place) is None
        return () if is_first else (Buffer(BufferKind.INPUT, microbatch, chunk),)
    if op.kind is OpKind.W:
        return (Buffer(BufferKind.WEIGHT_STASH, microbatch, chunk),)
    stash = Buffer(BufferKind.STASH, microbatch, chunk)
    if pipeline.after(place) is None:
        return (stash,)
    return (stash, Buffer(BufferKind.OUTPUT_GRADIENT, microbatch, chunk))


@_remembered
def _op_writes(op: Op, rank: int, pipeline: Pipeline) -> tuple[Buffer, ...]:
    made: list[Buffer] = []
    if op.kind is OpKind.F:
        made.append(Buffer(BufferKind.STASH, op.microbatch, op.chunk))
    if (result := result_buffer(op, rank, pipeline)) is not None:
        made.append(result)
    if op.kind is OpKind.B:
        made.append(Buffer(BufferKind.WEIGHT_STASH, op.microbatch, op.chunk))
    return tuple(made)


def _taker(op: Op, rank: int, pipeline: Pipeline) -> Place | None:
    """The virtual stage that waits for an op's result."""
    if op.kind is OpKind.W:
        return None
    place = Place(rank, op.chunk)
    return pipeline.after(place) if op.kind is OpKind.F else pipeline.before(place)


@_remembered
def feeder(op: Op, rank: int, pipeline: Pipeline) -> tuple[int, Op] | None:
    """The rank and the op whose result an op waits for; None where it waits for none."""
    if op.kind is OpKind.W:
        return None
    place = Place(rank, op.chunk)
    source = pipeline.before(place) if op.kind is OpKind.F else pipeline.after(place)
    return None if source is None else (source.rank, op._replace(chunk=source.chunk))


def result_buffer(op: Op, rank: int, pipeline: Pipeline) -> Buffer | None:
    """Where an F's activations or a B's input gradient are kept; None at an end of the chain.

    On one rank alone nothing is sent: the result is the next chunk's input already.
    """
    taker = _taker(op, rank, pipeline)
    if taker is None:
        return None
    is_forward = op.kind is OpKind.F
    if taker.rank == rank:
        kind = BufferKind.INPUT if is_forward else BufferKind.OUTPUT_GRADIENT
        return Buffer(kind, op.microbatch, taker.chunk)
    kind = BufferKind.OUTPUT if is_forward else BufferKind.INPUT_GRADIENT
    return Buffer(kind, op.microbatch, op.chunk)


@_remembered
def output_transfer(op: Op, rank: int, pipeline: Pipeline) -> Transfer | None:
    """The message that an op's result becomes, or None where it stays on the rank.

    The op that waits for it is the same op on the destination: F3 makes the next stage's F3 ready,
    B3 the previous stage's B3; from one end of the ranks to the other it is that of the next chunk.
    """
    taker = _taker(op, rank, pipeline)
    if taker is None or taker.rank == rank:
        return None
    payload = Payload.ACTIVATION if op.kind is OpKind.F else Payload.GRADIENT
    return Transfer(payload, rank, taker.rank, op.microbatch, op.chunk)


_SENT = {Payload.ACTIVATION: BufferKind.OUTPUT, Payload.GRADIENT: BufferKind.INPUT_GRADIENT}
_RECEIVED = {
    Payload.ACTIVATION: BufferKind.INPUT,
    Payload.GRADIENT: BufferKind.OUTPUT_GRADIENT,
    Payload.TIED: BufferKind.TIED_GRADIENT,
}


@_remembered
def sent_buffer(transfer: Transfer) -> Buffer:
    """The buffer whose value an activation or a gradient transfer carries."""
    return Buffer(_SENT[transfer.payload], transfer.microbatch, transfer.chunk)


@_remembered
def received_buffer(transfer: Transfer) -> Buffer:
    """The buffer that a transfer fills on its destination."""
    return Buffer(_RECEIVED[transfer.payload], transfer.microbatch, transfer.destination_chunk)
