"""The rules one stage's row of ops must keep, whatever the other stages do."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxmorph.schedule.ops import Op, OpKind


class RowFault(NamedTuple):
    """The first op that breaks a rule (or the row's length, when one is missing), and why."""

    position: int
    reason: str


def row_fault(order: Sequence[Op], num_microbatches: int, num_chunks: int = 1) -> RowFault | None:
    """Finds the first op of a stage's row that breaks a rule.

    The rules: every microbatch of every chunk has F, and either B and W or BW, each once; a
    microbatch runs F of chunk 0, 1, ..., then B (or BW) of the chunks in reverse, and W after its
    chunk's B; ops of one kind and chunk in microbatch order; a row splits all of its backwards or
    none.

    Args:
        order: The stage's ops, in execution order.
        num_microbatches: Number of microbatches in the step.
        num_chunks: Number of virtual stages of the row.

    Returns:
        The first fault, or None when the row keeps every rule.
    """
    forward_kind, weight_kind, full_kind = OpKind.F, OpKind.W, OpKind.BW
    # Ops of one kind and chunk run in microbatch order, so counts alone say what has run: here,
    # how many microbatches have passed F of each chunk, then B of each chunk from the last one.
    last_pass = 2 * num_chunks
    passed = [num_microbatches] + [0] * last_pass
    weights = [0] * num_chunks
    splits = fulls = False
    for position, (kind, microbatch, chunk) in enumerate(order):
        if not 0 <= chunk < num_chunks:
            return RowFault(position, _unknown_chunk(chunk, num_chunks))
        if kind is weight_kind:
            splits = True
            expected, ready = weights[chunk], passed[last_pass - chunk]
            weights[chunk] = expected + 1
        else:
            if kind is forward_kind:
                this_pass = 1 + chunk
            else:
                this_pass = last_pass - chunk
                if kind is full_kind:
                    fulls = True
                else:
                    splits = True
            expected, ready = passed[this_pass], passed[this_pass - 1]
            passed[this_pass] = expected + 1
        if microbatch != expected or microbatch >= ready or (fulls and splits):
            return RowFault(position, _why(order, position, num_microbatches, num_chunks))
    counts = {OpKind.F: passed[1 : 1 + num_chunks]}
    counts[OpKind.B if splits else OpKind.BW] = passed[: -1 - num_chunks : -1]
    if splits:
        counts[OpKind.W] = weights
    return _missing(counts, len(order), num_microbatches)


def _unknown_chunk(chunk: int, num_chunks: int) -> str:
    expected = f"0 to {num_chunks - 1}" if num_chunks > 1 else "0"
    return f"got chunk {chunk}, expected {expected}"


def _why(order: Sequence[Op], position: int, num_microbatches: int, num_chunks: int) -> str:
    op, earlier = order[position], order[:position]
    expected = sum(before._replace(microbatch=op.microbatch) == op for before in earlier)
    if op.microbatch >= num_microbatches:
        return f"{op} is beyond the last microbatch, {num_microbatches - 1}"
    if op in earlier:
        return f"{op} is there twice"
    if op.microbatch != expected:
        return f"{op} is out of microbatch order, expected {op._replace(microbatch=expected)}"
    for needed in _needed(op, num_chunks):
        if needed not in earlier:
            return f"{op} comes before {needed}"
    return f"{op} mixes full backwards (BW) with split ones (B, W)"


def _needed(op: Op, num_chunks: int) -> list[Op]:
    """What must stand before ``op`` in its row."""
    if op.kind is OpKind.F:
        return [op._replace(chunk=op.chunk - 1)] if op.chunk else []
    if op.kind is OpKind.W:
        return [op._replace(kind=OpKind.B)]
    above = [op._replace(chunk=op.chunk + 1)] if op.chunk + 1 < num_chunks else []
    return [op._replace(kind=OpKind.F), *above]


def _missing(
    counts: Mapping[OpKind, Sequence[int]], num_ops: int, num_microbatches: int
) -> RowFault | None:
    """The first op that a row without faults lacks, given how many ran of each kind and chunk."""
    for kind, of_chunks in counts.items():
        for chunk, count in enumerate(of_chunks):
            if count < num_microbatches:
                return RowFault(num_ops, f"{Op(kind, count, chunk)} is missing")
    return None
