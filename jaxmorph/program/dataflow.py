"""What each op makes for others, and which buffers each instruction reads and writes.

Both follow from the instruction and its rank alone, so lowering, the executor and the check agree
by construction.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from jaxmorph.placement import Place, Placement
from jaxmorph.program.instructions import (
    Buffer,
    BufferKind,
    Fetch,
    Offload,
    Payload,
    RankInstructions,
    Receive,
    Reduce,
    Run,
    Send,
    SendReceive,
    Transfer,
)
from jaxmorph.records import Link
from jaxmorph.schedule.ops import Op, OpKind


class Flow(NamedTuple):
    """What a virtual stage makes for a neighbour: an activation or a gradient of each microbatch.

    The target's same op needs it: F3 needs F3 of the stage before, B3 needs B3 of the stage after.
    """

    payload: Payload
    source: Place
    target: Place

    @property
    def link(self) -> Link:
        """The link between its two ranks."""
        return Link.of(self.source.rank, self.target.rank)

    @property
    def is_handover(self) -> bool:
        """Whether its two virtual stages are of one rank, so that it needs no message."""
        return self.source.rank == self.target.rank

    @property
    def goes_around(self) -> bool:
        """Whether it wraps around between the last rank and the first, to another chunk."""
        return self.source.chunk != self.target.chunk

    def transfers(self, num_microbatches: int) -> list[Transfer]:
        """The messages of all microbatches, if the flow is between two ranks."""
        (source, chunk), (target, _) = self.source, self.target
        return [
            Transfer(self.payload, source, target, microbatch, chunk)
            for microbatch in range(num_microbatches)
        ]


def flows(placement: Placement) -> Iterator[Flow]:
    """All flows of a pipeline: activations to the next virtual stage, gradients back from it."""
    for here, after in placement.hops():
        yield Flow(Payload.ACTIVATION, here, after)
        yield Flow(Payload.GRADIENT, after, here)


Uses = tuple[tuple[Buffer, ...], tuple[Buffer, ...]]
"""The buffers that an instruction reads, and those that it fills."""

# Looked up many times in every plan. The keys leave out the rank: almost all ranks' ops are alike.
_cached = lru_cache(maxsize=1 << 16)
_buffer = _cached(Buffer)


def uses(program: RankInstructions) -> Iterator[Uses]:
    """What each of a rank's instructions reads and fills.

    The tokens of the first F and the loss weight of the last B come from the host, not a buffer.
    """
    placement = program.placement
    ends = [_ends(Place(program.rank, chunk), placement) for chunk in range(placement.num_chunks)]
    for step in program.instructions:  # the most frequent kinds first
        if isinstance(step, Run):
            yield _op_uses(step.op, ends[step.op.chunk])
        elif isinstance(step, Receive):
            yield (), (received_buffer(step.transfer, placement),)
        elif isinstance(step, Send):
            transfer = step.transfer
            yield _send_uses(transfer.payload, transfer.microbatch, transfer.chunk)
        elif isinstance(step, SendReceive):
            yield (sent_buffer(step.sent),), (received_buffer(step.received, placement),)
        elif isinstance(step, Reduce):
            yield (() if step.buffer is None else (step.buffer,)), ()
        elif isinstance(step, Offload | Fetch):
            yield (step.buffer,), ()
        else:
            yield (), ()


class _Ends(NamedTuple):
    """What a virtual stage has on either side.

    Attributes:
        is_first: Whether it is the first one of the pipeline.
        forward_to: The chunk that its activations are handed to, if it is of the same rank.
        backward_to: The chunk that its gradients are handed to, if it is of the same rank.
    """

    is_first: bool
    is_last: bool
    forward_to: int | None
    backward_to: int | None


@_cached
def _ends(here: Place, placement: Placement) -> _Ends:
    beside = placement.after(here), placement.before(here)
    own = (it.chunk if it is not None and it.rank == here.rank else None for it in beside)
    return _Ends(here == placement.first, here == placement.last, *own)


@_cached
def _op_uses(op: Op, ends: _Ends) -> Uses:
    of = op.microbatch, op.chunk
    result = _result(op, ends)
    made = () if result is None else (result,)
    if op.kind is OpKind.F:
        reads = () if ends.is_first else (_buffer(BufferKind.INPUT, *of),)
        return reads, (_buffer(BufferKind.STASH, *of), *made)
    if op.kind is OpKind.W:
        return tuple(weight_stashes(op)), ()
    weight_stash = _buffer(BufferKind.WEIGHT_STASH, *of)
    stash = _buffer(BufferKind.STASH, *of)
    reads = (stash,) if ends.is_last else (stash, _buffer(BufferKind.OUTPUT_GRADIENT, *of))
    return reads, (*made, weight_stash) if op.kind is OpKind.B else made


def weight_stashes(op: Op) -> Iterator[Buffer]:
    """What a W reads: a stash of each of its microbatches."""
    for microbatch in op.microbatches:
        yield _buffer(BufferKind.WEIGHT_STASH, microbatch, op.chunk)


def result_buffer(op: Op, rank: int, placement: Placement) -> Buffer | None:
    """The buffer of an F's activations or a B's input gradient; None at an end of the chain."""
    return _result(op, _ends(Place(rank, op.chunk), placement))


@_cached
def _result(op: Op, ends: _Ends) -> Buffer | None:
    microbatch, chunk = op.microbatch, op.chunk
    # A handover needs no message: the result is the other chunk's input at once.
    if op.kind is OpKind.F and not ends.is_last:
        if ends.forward_to is not None:
            return _buffer(BufferKind.INPUT, microbatch, ends.forward_to)
        return _buffer(BufferKind.OUTPUT, microbatch, chunk)
    if op.kind in (OpKind.B, OpKind.BW) and not ends.is_first:
        if ends.backward_to is not None:
            return _buffer(BufferKind.OUTPUT_GRADIENT, microbatch, ends.backward_to)
        return _buffer(BufferKind.INPUT_GRADIENT, microbatch, chunk)
    return None


_SENT = {Payload.ACTIVATION: BufferKind.OUTPUT, Payload.GRADIENT: BufferKind.INPUT_GRADIENT}
_RECEIVED = {
    Payload.ACTIVATION: BufferKind.INPUT,
    Payload.GRADIENT: BufferKind.OUTPUT_GRADIENT,
    Payload.TIED: BufferKind.TIED_GRADIENT,
}


@_cached
def _send_uses(payload: Payload, microbatch: int, chunk: int) -> Uses:
    if payload is Payload.TIED:  # no buffer holds it
        return (), ()
    return (_buffer(_SENT[payload], microbatch, chunk),), ()


def sent_buffer(transfer: Transfer) -> Buffer:
    """The buffer that an activation or gradient transfer sends."""
    return _buffer(_SENT[transfer.payload], transfer.microbatch, transfer.chunk)


def received_buffer(transfer: Transfer, placement: Placement) -> Buffer:
    """The buffer that a transfer fills on its destination."""
    payload, source, _, microbatch, chunk = transfer
    target = _target_chunks(placement).get((payload, source, chunk), chunk)
    return _buffer(_RECEIVED[payload], microbatch, target)


@_cached
def _target_chunks(placement: Placement) -> dict[tuple[Payload, int, int], int]:
    """By payload, rank and chunk of a flow's source: its target's chunk. Tied ones have no flow."""
    made = flows(placement)
    return {(it.payload, it.source.rank, it.source.chunk): it.target.chunk for it in made}


def last_uses(program: RankInstructions) -> list[list[Buffer]]:
    """The buffers that each of a rank's instructions is the last to use: those it can free."""
    last: dict[Buffer, int] = {}
    for at, (read, made) in enumerate(uses(program)):
        last |= dict.fromkeys((*read, *made), at)
    freed: list[list[Buffer]] = [[] for _ in program.instructions]
    for buffer, at in last.items():
        freed[at].append(buffer)
    return freed


_PAYLOADS = frozenset({*_SENT.values(), *_RECEIVED.values()} - {BufferKind.TIED_GRADIENT})


def most_payloads(program: RankInstructions) -> int:
    """The most activations and gradients, received or to be sent, that a rank holds at once."""
    held: set[Buffer] = set()
    most = 0
    for (_, made), freed in zip(uses(program), last_uses(program), strict=True):
        held.update(buffer for buffer in made if buffer.kind in _PAYLOADS)
        most = max(most, len(held))
        held.difference_update(freed)
    return most
