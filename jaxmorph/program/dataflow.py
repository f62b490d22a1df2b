"""Which buffers each instruction reads and writes, and which message carries an op's result.

Both follow from the instruction and its rank alone, so the executor, the checker and the pass that
frees buffers agree by construction.
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
    RankInstructions,
    Receive,
    Reduce,
    Run,
    Send,
    Transfer,
)
from jaxmorph.schedule.ops import Op, OpKind

# All plans of a run share their ops, and lowering looks each of them up many times.
_cached = lru_cache(maxsize=1 << 14)


def reads(instruction: Instruction, rank: int, pipeline: Pipeline) -> tuple[Buffer, ...]:
    """The buffers an instruction reads.

    The tokens of the first F and the loss weight of the last B come from the host, not a buffer.
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
    """The buffers an instruction fills."""
    match instruction:
        case Run(op):
            return _op_writes(op, rank, pipeline)
        case Receive(transfer):
            return (received_buffer(transfer),)
        case _:
            return ()


@_cached
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


@_cached
def _op_writes(op: Op, rank: int, pipeline: Pipeline) -> tuple[Buffer, ...]:
    made: list[Buffer] = []
    if op.kind is OpKind.F:
        made.append(Buffer(BufferKind.STASH, op.microbatch, op.chunk))
    if (result := result_buffer(op, rank, pipeline)) is not None:
        made.append(result)
    if op.kind is OpKind.B:
        made.append(Buffer(BufferKind.WEIGHT_STASH, op.microbatch, op.chunk))
    return tuple(made)


def _consumer(op: Op, rank: int, pipeline: Pipeline) -> Place | None:
    """The virtual stage that needs an op's result."""
    if op.kind is OpKind.W:
        return None
    place = Place(rank, op.chunk)
    return pipeline.after(place) if op.kind is OpKind.F else pipeline.before(place)


@_cached
def feeder(op: Op, rank: int, pipeline: Pipeline) -> tuple[int, Op] | None:
    """The rank and the op whose result an op needs, or None."""
    if op.kind is OpKind.W:
        return None
    place = Place(rank, op.chunk)
    source = pipeline.before(place) if op.kind is OpKind.F else pipeline.after(place)
    return None if source is None else (source.rank, op._replace(chunk=source.chunk))


def result_buffer(op: Op, rank: int, pipeline: Pipeline) -> Buffer | None:
    """The buffer of an F's activations or a B's input gradient; None at an end of the chain."""
    consumer = _consumer(op, rank, pipeline)
    if consumer is None:
        return None
    is_forward = op.kind is OpKind.F
    if consumer.rank == rank:  # a single rank sends nothing: the result is the next chunk's input
        kind = BufferKind.INPUT if is_forward else BufferKind.OUTPUT_GRADIENT
        return Buffer(kind, op.microbatch, consumer.chunk)
    kind = BufferKind.OUTPUT if is_forward else BufferKind.INPUT_GRADIENT
    return Buffer(kind, op.microbatch, op.chunk)


@_cached
def output_transfer(op: Op, rank: int, pipeline: Pipeline) -> Transfer | None:
    """The message that carries an op's result, or None if it stays on the rank.

    The same op of the destination needs it: F3 the next stage's F3, B3 the previous stage's B3.
    """
    consumer = _consumer(op, rank, pipeline)
    if consumer is None or consumer.rank == rank:
        return None
    payload = Payload.ACTIVATION if op.kind is OpKind.F else Payload.GRADIENT
    return Transfer(payload, rank, consumer.rank, op.microbatch, op.chunk)


_SENT = {Payload.ACTIVATION: BufferKind.OUTPUT, Payload.GRADIENT: BufferKind.INPUT_GRADIENT}
_RECEIVED = {
    Payload.ACTIVATION: BufferKind.INPUT,
    Payload.GRADIENT: BufferKind.OUTPUT_GRADIENT,
    Payload.TIED: BufferKind.TIED_GRADIENT,
}


_PAYLOADS = frozenset({*_SENT.values(), *_RECEIVED.values()} - {BufferKind.TIED_GRADIENT})


def most_payloads(program: RankInstructions) -> int:
    """The most activations and gradients, received or to be sent, that a rank holds at once."""
    held: set[Buffer] = set()
    most = 0
    for step in program.instructions:
        if isinstance(step, Free):
            held.discard(step.buffer)
            continue
        made = writes(step, program.rank, program.pipeline)
        held |= {buffer for buffer in made if buffer.kind in _PAYLOADS}
        most = max(most, len(held))
    return most


@_cached
def sent_buffer(transfer: Transfer) -> Buffer:
    """The buffer that an activation or gradient transfer sends."""
    return Buffer(_SENT[transfer.payload], transfer.microbatch, transfer.chunk)


@_cached
def received_buffer(transfer: Transfer) -> Buffer:
    """The buffer that a transfer fills on its destination."""
    return Buffer(_RECEIVED[transfer.payload], transfer.microbatch, transfer.destination_chunk)
