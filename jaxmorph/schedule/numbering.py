"""Ops as numbers, which the planner's inner loops index lists with.

Op number: stage * 3 N + (0 for F, N for B, 2 N for W) + microbatch.
"""

from collections.abc import Iterable

from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.schedule import Schedule

KINDS = (OpKind.F, OpKind.B, OpKind.W)


def to_schedule(
    name: str, num_stages: int, num_microbatches: int, numbers: Iterable[int]
) -> Schedule:
    """The schedule in which every stage runs its ops in the order of their numbers' appearance.

    Args:
        numbers: Each of the 3 S N ops once.
    """
    ops = [Op(kind, microbatch) for kind in KINDS for microbatch in range(num_microbatches)]
    rows: list[list[Op]] = [[] for _ in range(num_stages)]
    for number in numbers:
        stage, op = divmod(number, len(ops))
        rows[stage].append(ops[op])
    return Schedule(name, num_microbatches, tuple(map(tuple, rows)))
