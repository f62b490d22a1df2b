"""The rules one stage's row of ops must keep, whatever the other stages do."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxmorph.schedule.ops import Op, OpKind


class RowFault(NamedTuple):
    """The first op that breaks a rule (or the row's length, when one is missing), and why."""

    position: int
    reason: str


def row_fault(order: Sequence[Op], num_microbatches: int) -> RowFault | None:
    """Finds the first op of a stage's row that breaks a rule.

    The rules: every microbatch has F, and either B and W or BW, each once; F before B before W
    (F before BW); ops of one kind in microbatch order; a row splits all of its backwards or none.

    Args:
        order: The stage's ops, in execution order.
        num_microbatches: Number of microbatches in the step.

    Returns:
        The first fault, or None when the row keeps every rule.
    """
    # Ops of one kind run in microbatch order, so counts alone say what has run.
    forward_kind, input_kind, weight_kind = OpKind.F, OpKind.B, OpKind.W
    forwards = inputs = weights = fulls = 0
    for position, (kind, microbatch, chunk) in enumerate(order):
        if kind is forward_kind:
            expected, ready = forwards, num_microbatches
            forwards += 1
        elif kind is input_kind:
            expected, ready = inputs, forwards
            inputs += 1
        elif kind is weight_kind:
            expected, ready = weights, inputs
            weights += 1
        else:
            expected, ready = fulls, forwards
            fulls += 1
        if chunk or microbatch != expected or microbatch >= ready or (fulls and inputs):
            return RowFault(position, _why(order, position, num_microbatches, expected))
    return _missing(order, num_microbatches, forwards, inputs + fulls, weights + fulls)


def _why(order: Sequence[Op], position: int, num_microbatches: int, expected: int) -> str:
    op, earlier = order[position], order[:position]
    before = {OpKind.F: None, OpKind.B: OpKind.F, OpKind.W: OpKind.B, OpKind.BW: OpKind.F}[op.kind]
    if op.chunk:
        return f"{op} is of chunk {op.chunk}, expected chunk 0: one virtual stage a rank"
    if op.microbatch >= num_microbatches:
        return f"{op} is beyond the last microbatch, {num_microbatches - 1}"
    if op in earlier:
        return f"{op} is there twice"
    if op.microbatch != expected:
        return f"{op} is out of microbatch order, expected {Op(op.kind, expected)}"
    if before and Op(before, op.microbatch) not in earlier:
        return f"{op} comes before {Op(before, op.microbatch)}"
    return f"{op} mixes full backwards (BW) with split ones (B, W)"


def _missing(
    order: Sequence[Op], num_microbatches: int, forwards: int, inputs: int, weights: int
) -> RowFault | None:
    splits = any(op.kind is OpKind.B for op in order)
    counts = {OpKind.F: forwards, OpKind.B if splits else OpKind.BW: inputs, OpKind.W: weights}
    for kind, count in counts.items():
        if count < num_microbatches:
            return RowFault(len(order), f"{Op(kind, count)} is missing")
    return None
