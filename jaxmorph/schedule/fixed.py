"""Schedules that depend only on the numbers of stages, microbatches and chunks."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, zip_longest

from jaxmorph.errors import UserError
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.schedule import Schedule


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all full backwards; every stage holds all microbatches at its peak.

    Source: Huang et al., "GPipe". Here backwards run in microbatch order rather than reversed, so
    that gradients are summed in the same order as under every other schedule.
    """
    row = (*_ops(OpKind.F, num_microbatches), *_ops(OpKind.BW, num_microbatches))
    return Schedule("gpipe", num_microbatches, (row,) * num_stages)


def one_forward_one_backward(
    num_stages: int, num_microbatches: int, eager: bool = False
) -> Schedule:
    """1F1B: stage i runs S - i forwards, then one full backward and one forward in turn.

    Source: Narayanan et al., "PipeDream-Flush"; eager: Zhuang et al., "On Optimizing the
    Communication of Model Parallelism".

    Stage i holds at most S - i microbatches, or 2(S - i) - 1 when eager.

    Args:
        eager: Run 2(S - i) - 1 forwards first. Then the step pays a latency of up to half a turn
            (half of F and BW) once per link and direction, not in every turn.
    """

    def row(stage: int) -> Iterator[Op]:
        warmup = num_stages - stage
        warmup = min(2 * warmup - 1 if eager else warmup, num_microbatches)
        yield from _ops(OpKind.F, warmup)
        for microbatch in range(num_microbatches):
            yield Op(OpKind.BW, microbatch)
            if warmup + microbatch < num_microbatches:
                yield Op(OpKind.F, warmup + microbatch)

    return _schedule("1f1b-eager" if eager else "1f1b", num_stages, num_microbatches, row)


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Interleaved 1F1B: each rank runs V virtual stages, for 1/V of the bubble of 1F1B.

    Microbatches run in rounds of R (S if N is a multiple of S): a round's forwards of chunk 0, then
    of chunk 1, ..., before the next round, and backwards likewise from the last chunk down. Rank i
    runs (V - 1) R + 2(S - i) - 1 forwards, then one full backward and one forward in turn. With
    equal ranks, links without delay and N >= S the bubble is (S - 1) / (V N + S - 1), whatever F
    and BW take.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", section 2.2, where N is a multiple of S.

    Args:
        num_chunks: V, at least 1. With one chunk, this is eager 1F1B.

    Raises:
        UserError: N cannot be cut into equal rounds.
    """
    size = _round_size(num_stages, num_microbatches)

    def row(rank: int) -> Iterator[Op]:
        forwards = list(_rounds(OpKind.F, num_microbatches, size, range(num_chunks)))
        backwards = list(_rounds(OpKind.BW, num_microbatches, size, range(num_chunks)[::-1]))
        warmup = min((num_chunks - 1) * size + 2 * (num_stages - rank) - 1, len(forwards))
        yield from forwards[:warmup]
        for backward, forward in zip_longest(backwards, forwards[warmup:]):
            yield backward
            if forward is not None:
                yield forward

    return _schedule("interleaved", num_stages, num_microbatches, row)


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """Zero-bubble H1: 1F1B's warm-ups and live activations, with the weight gradients delayed.

    Stage i runs S - i forwards first, and each W follows i backwards after its B. It holds at most
    S - i microbatches until B, and S until W.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", section 2.2.
    """

    def row(stage: int) -> Iterator[Op]:
        return _split_row(num_stages - stage, stage, num_microbatches)

    return _schedule("zb-h1", num_stages, num_microbatches, row)


def zb_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """Zero-bubble H2: enough warm-up forwards that equal ops leave no bubble inside a stage.

    Stage i runs 2(S - i) - 1 forwards first, and each W follows 2i backwards after its B. It holds
    at most 2(S - i) - 1 microbatches until B, and 2S - 1 until W.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", section 2.3.
    """

    def row(stage: int) -> Iterator[Op]:
        return _split_row(2 * (num_stages - stage) - 1, 2 * stage, num_microbatches)

    return _schedule("zb-h2", num_stages, num_microbatches, row)


def zb_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Zero-bubble V: no bubble inside a rank if ops are equal, with the memory of 1F1B.

    Each rank runs two virtual stages of half the size, placed in a V. It holds at most 2 S of their
    stashes, counted until B or until W: as much as S stashes of a whole stage. Rank r runs
    2(S - r) - 1 forwards of chunk 0, then r of each chunk in turn, then F, B, W of chunk 1 until
    chunk 0 has its first gradient. From there on, F, B, W of the chunks take turns. Once forwards
    and the B that follow them run out, postponed W fill the time until the next B.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (V-ZB); first described in
    section 6 of "Zero Bubble Pipeline Parallelism".
    """
    most = max(num_microbatches, 2 * num_stages - 1)  # fewer: the same order, without the last ones
    return _v_schedule("zb-v", num_stages, num_microbatches, partial(_zb_v_turns, most))


def dualpipe_v(num_stages: int, num_microbatches: int) -> Schedule:
    """DualPipe-V's order of ops, where a forward and a backward run one after the other.

    It is made for accelerators that run a forward of one chunk and a backward of the other side by
    side, so that each hides the messages of the other. Nothing overlaps here: with equal ops a
    step is as long as that of ``zb-v``, and a rank holds one stash more, 2 S + 1.

    Source: DeepSeek-AI, "DualPipe", 2025: the half of it that needs no copy of the parameters.

    Raises:
        UserError: Fewer than two microbatches per stage.
    """
    least = 2 * num_stages
    if num_microbatches < least:
        raise UserError(
            f"dualpipe-v: got {num_microbatches} microbatches on {num_stages} stages, expected at "
            f"least {least}, two per stage"
        )
    turns = partial(_dualpipe_v_turns, num_microbatches)
    return _v_schedule("dualpipe-v", num_stages, num_microbatches, turns)


FIXED_SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "1f1b-eager": partial(one_forward_one_backward, eager=True),
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
}
"""Builders of schedules with one chunk; each takes the numbers of stages and microbatches."""

V_SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"zb-v": zb_v, "dualpipe-v": dualpipe_v}
"""Builders of schedules with two chunks in a V."""


def _round_size(num_stages: int, num_microbatches: int) -> int:
    """How many microbatches a chunk runs in a row: N in floor(N / S) equal rounds, at least one."""
    rounds = max(1, num_microbatches // num_stages)
    if num_microbatches % rounds:
        raise UserError(
            f"interleaved: got {num_microbatches} microbatches on {num_stages} stages, expected a "
            f"multiple of {rounds}, to run in {rounds} equal rounds of at least {num_stages}"
        )
    return num_microbatches // rounds


def _rounds(kind: OpKind, num_microbatches: int, size: int, chunks: Sequence[int]) -> Iterator[Op]:
    """All ops of a kind: ``size`` microbatches of each chunk, then the next ``size``."""
    for first in range(0, num_microbatches, size):
        for chunk in chunks:
            yield from (Op(kind, first + place, chunk) for place in range(size))


def _split_row(warmup: int, weight_delay: int, num_microbatches: int) -> Iterator[Op]:
    """``warmup`` forwards, then B, W and F in turn; W is ``weight_delay`` microbatches behind B."""
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


_Turn = tuple[OpKind, int]
"""An op's kind and chunk; each such op runs the next microbatch."""


def _v_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    turns: Callable[[int, int], Iterable[_Turn]],
) -> Schedule:
    """The schedule in which each rank runs ``turns(num_stages, rank)`` in order."""

    def row(rank: int) -> Iterator[Op]:
        seen = Counter[_Turn]()
        for kind, chunk in turns(num_stages, rank):
            microbatch = seen[kind, chunk]
            seen[kind, chunk] += 1
            if microbatch < num_microbatches:
                yield Op(kind, microbatch, chunk)

    rows = tuple(tuple(row(rank)) for rank in range(num_stages))
    return Schedule(name, num_microbatches, rows, "v")


_FIRST, _SECOND = ([(kind, chunk) for kind in (OpKind.F, OpKind.B, OpKind.W)] for chunk in (0, 1))


def _zb_v_turns(num_microbatches: int, num_stages: int, rank: int) -> list[_Turn]:
    """For at least 2 S - 1 microbatches."""
    without_forward = num_stages - rank - 1
    return [
        *_FIRST[:1] * (2 * (num_stages - rank) - 1),
        *[_SECOND[0], _FIRST[0]] * rank,
        *_SECOND * (num_stages - rank),
        *[*_FIRST, *_SECOND] * (num_microbatches - num_stages - without_forward),
        *[*_FIRST[1:], *_SECOND] * without_forward,
        *[_FIRST[1], _SECOND[1]] * rank,
        *_FIRST[1:] * (num_stages - rank),
        *[_SECOND[2], _FIRST[2]] * rank,
    ]


def _dualpipe_v_turns(num_microbatches: int, num_stages: int, rank: int) -> list[_Turn]:
    """For at least 2 S microbatches."""
    later, own = num_stages - rank - 1, rank + 1
    (forward, *backward), (second_forward, *second_backward) = _FIRST, _SECOND
    # Half of the backwards after all forwards postpone their W, which fill waits for other ranks.
    last = [second_backward, backward] * own
    put_off = deque([*(weight for _, weight in last[own:]), *[backward[1]] * later])
    return [
        *[forward] * (2 * later),
        *[forward, second_forward] * own,
        *[*second_backward, second_forward] * later,
        *[forward, *second_backward, second_forward, *backward]
        * (num_microbatches - 2 * num_stages + own),
        *[*second_backward, second_forward, *backward] * later,
        *chain.from_iterable(last[:own]),
        *(input_turn for input_turn, _ in last[own:]),
        *chain.from_iterable((put_off.popleft(), backward[0]) for _ in range(later)),
        *put_off,
    ]


def _ops(kind: OpKind, num_microbatches: int) -> list[Op]:
    return [Op(kind, microbatch) for microbatch in range(num_microbatches)]


def _schedule(
    name: str, num_stages: int, num_microbatches: int, row: Callable[[int], Iterable[Op]]
) -> Schedule:
    return Schedule(name, num_microbatches, tuple(tuple(row(stage)) for stage in range(num_stages)))
