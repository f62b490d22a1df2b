"""Schedules whose order follows from the number of stages and microbatches alone."""

from collections.abc import Callable, Iterable, Iterator

from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.schedule import Schedule


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all full backwards.

    Source: Huang et al., "GPipe", with backwards in microbatch order rather than reversed, so that
    gradients are summed in the same order as under every other schedule.

    Args:
        num_stages: Number of stages.
        num_microbatches: Number of microbatches.

    Returns:
        The schedule; every stage holds all microbatches at its peak.
    """
    row = (*_ops(OpKind.F, num_microbatches), *_ops(OpKind.BW, num_microbatches))
    return Schedule("gpipe", num_microbatches, (row,) * num_stages)


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B: stage i runs S - i forwards, then one full backward and one forward in turn.

    Source: Narayanan et al., "PipeDream-Flush".

    Args:
        num_stages: Number of stages, S.
        num_microbatches: Number of microbatches.

    Returns:
        The schedule; stage i holds at most S - i microbatches.
    """

    def row(stage: int) -> Iterator[Op]:
        warmup = min(num_stages - stage, num_microbatches)
        yield from _ops(OpKind.F, warmup)
        for microbatch in range(num_microbatches):
            yield Op(OpKind.BW, microbatch)
            if warmup + microbatch < num_microbatches:
                yield Op(OpKind.F, warmup + microbatch)

    return _schedule("1f1b", num_stages, num_microbatches, row)


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """Zero-bubble H1: 1F1B's warm-ups and live activations, with the weight gradients delayed.

    Stage i runs S - i forwards first and each W i backwards after its B, so every stage holds S
    microbatches until W.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", section 2.2.

    Args:
        num_stages: Number of stages, S.
        num_microbatches: Number of microbatches.

    Returns:
        The schedule; stage i holds at most S - i microbatches until B.
    """

    def row(stage: int) -> Iterator[Op]:
        return _split_row(num_stages - stage, stage, num_microbatches)

    return _schedule("zb-h1", num_stages, num_microbatches, row)


def zb_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """Zero-bubble H2: enough warm-up forwards that equal ops leave no bubble inside a stage.

    Stage i runs 2(S - i) - 1 forwards first and each W 2i backwards after its B, so every stage
    holds 2S - 1 microbatches until W.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", section 2.3.

    Args:
        num_stages: Number of stages, S.
        num_microbatches: Number of microbatches.

    Returns:
        The schedule; stage i holds at most 2(S - i) - 1 microbatches until B.
    """

    def row(stage: int) -> Iterator[Op]:
        return _split_row(2 * (num_stages - stage) - 1, 2 * stage, num_microbatches)

    return _schedule("zb-h2", num_stages, num_microbatches, row)


FIXED_SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
}
"""Schedules by name that depend on no cost: each takes the numbers of stages and microbatches."""


def _split_row(warmup: int, weight_delay: int, num_microbatches: int) -> Iterator[Op]:
    """``warmup`` forwards, then B, W, F in turn, with W ``weight_delay`` microbatches behind B."""
    warmup = min(warmup, num_microbatches)
    yield from _ops(OpKind.F, warmup)
    for microbatch in range(num_microbatches):
        yield Op(OpKind.B, microbatch)
        if microbatch >= weight_delay:
            yield Op(OpKind.W, microbatch - weight_delay)
        if warmup + microbatch < num_microbatches:
            yield Op(OpKind.F, warmup + microbatch)
    done = max(0, num_microbatches - weight_delay)
    yield from (Op(OpKind.W, microbatch) for microbatch in range(done, num_microbatches))


def _ops(kind: OpKind, num_microbatches: int) -> list[Op]:
    return [Op(kind, microbatch) for microbatch in range(num_microbatches)]


def _schedule(
    name: str, num_stages: int, num_microbatches: int, row: Callable[[int], Iterable[Op]]
) -> Schedule:
    return Schedule(name, num_microbatches, tuple(tuple(row(stage)) for stage in range(num_stages)))
