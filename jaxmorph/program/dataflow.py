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
    SendReceive,
    Transfer,
)
from jaxmorph.schedule.ops import Op, OpKind

# Looked up many times in every plan. The keys leave out the rank: almost all ranks' ops are alike.
_cached = lru_cache(maxsize=1 << 16)
_buffer = _cached(Buffer)


def reads(instruction: Instruction, rank: int, pipeline: Pipeline) -> tuple[Buffer, ...]:
    """The buffers an instruction reads.

    The tokens of the first F and the loss weight of the last B come from the host, not a buffer.
    """
    match instruction:
        case Run(op):
            before, after = _neighbours(rank, op.chunk, pipeline)
            return _op_reads(op, before is None, after is None)
        case Send(transfer) if transfer.payload is not Payload.TIED:
            return (sent_buffer(transfer),)
        case SendReceive(sent, _):
            return (sent_buffer(sent),)
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
            return _op_writes(op, result_buffer(op, rank, pipeline))
        case Receive(transfer) | SendReceive(_, transfer):
            return (received_buffer(transfer),)
        case _:
            return ()


@_cached
def _op_reads(op: Op, is_first: bool, is_last: bool) -> tuple[Buffer, ...]:
    of = op.microbatch, op.chunk
    if op.kind is OpKind.F:
        return () if is_first else (_buffer(BufferKind.INPUT, *of),)
    if op.kind is OpKind.W:
        return (_buffer(BufferKind.WEIGHT_STASH, *of),)
    stash = _buffer(BufferKind.STASH, *of)
    return (stash,) if is_last else (stash, _buffer(BufferKind.OUTPUT_GRADIENT, *of))


@_cached
def _op_writes(op: Op, result: Buffer | None) -> tuple[Buffer, ...]:
    made = () if result is None else (result,)
    if op.kind is OpKind.F:
        return (_buffer(BufferKind.STASH, op.microbatch, op.chunk), *made)
    if op.kind is OpKind.B:
        return (*made, _buffer(BufferKind.WEIGHT_STASH, op.microbatch, op.chunk))
    return made


@_cached
def _neighbours(rank: int, chunk: int, pipeline: Pipeline) -> tuple[Place | None, Place | None]:
    """The virtual stages before and after a rank's chunk."""
    place = Place(rank, chunk)
    return pipeline.before(place), pipeline.after(place)


def consumer(op: Op, rank: int, pipeline: Pipeline) -> Place | None:
    """The virtual stage that needs an op's result."""
    before, after = _neighbours(rank, op.chunk, pipeline)
    return None if op.kind is OpKind.W else after if op.kind is OpKind.F else before


def feeder(op: Op, rank: int, pipeline: Pipeline) -> tuple[int, Op] | None:
    """The rank and the op whose result an op needs, or None."""
    before, after = _neighbours(rank, op.chunk, pipeline)
    source = None if op.kind is OpKind.W else before if op.kind is OpKind.F else after
    if source is None:
        return None
    return source.rank, op if source.chunk == op.chunk else op._replace(chunk=source.chunk)


def result_buffer(op: Op, rank: int, pipeline: Pipeline) -> Buffer | None:
    """The buffer of an F's activations or a B's input gradient; None at an end of the chain."""
    there = consumer(op, rank, pipeline)
    if there is None:
        return None
    is_forward = op.kind is OpKind.F
    if there.rank == rank:  # a single rank sends nothing: the result is the next chunk's input
        kind = BufferKind.INPUT if is_forward else BufferKind.OUTPUT_GRADIENT
        return _buffer(kind, op.microbatch, there.chunk)
    kind = BufferKind.OUTPUT if is_forward else BufferKind.INPUT_GRADIENT
    return _buffer(kind, op.microbatch, op.chunk)


def output_transfer(op: Op, rank: int, pipeline: Pipeline) -> Transfer | None:
    """The message that carries an op's result, or None if it stays on the rank.

    The same op of the destination needs it: F3 the next stage's F3, B3 the previous stage's B3.
    """
    there = consumer(op, rank, pipeline)
    if there is None or there.rank == rank:
        return None
    payload = Payload.ACTIVATION if op.kind is OpKind.F else Payload.GRADIENT
    return Transfer(payload, rank, there.rank, op.microbatch, op.chunk)


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


def sent_buffer(transfer: Transfer) -> Buffer:
    """The buffer that an activation or gradient transfer sends."""
    return _buffer(_SENT[transfer.payload], transfer.microbatch, transfer.chunk)


def received_buffer(transfer: Transfer) -> Buffer:
    """The buffer that a transfer fills on its destination."""
    return _buffer(_RECEIVED[transfer.payload], transfer.microbatch, transfer.destination_chunk)
