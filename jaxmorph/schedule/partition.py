"""Cuts layers into stages: as configured, or so that the slowest stage is as fast as possible."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

from jaxmorph.errors import UserError

_PICOSECONDS_PER_MS = 10**9
_Key = tuple[int, int, tuple[int, ...]]


def cut_layers(
    num_layers: int,
    num_stages: int,
    layers: Literal["auto", "even"] | Sequence[int] = "even",
    num_chunks: int = 1,
) -> tuple[range, ...]:
    """The layers of each virtual stage, in the order of the pipeline.

    Args:
        layers: The number of layers of each virtual stage, or "even". With "even" the middle stages
            get the remainder, because the first stage also embeds and the last also has the head.
            "auto" means "even" here, where no costs are known.
        num_chunks: The number of virtual stages of each stage. The planner assumes
            equally long chunks, so with several of them "even" allows no remainder.

    Raises:
        UserError: More stages than layers, counts that do not add up, or a remainder with chunks.
    """
    num_parts = num_stages * num_chunks
    if num_chunks == 1 and not 1 <= num_stages <= num_layers:
        raise UserError(
            f"parallelism.stages: got {num_stages}, expected between 1 and the model's "
            f"{num_layers} layers"
        )
    if num_chunks > 1:
        _check_chunks(num_layers, num_stages, num_chunks, layers)
    counts = list(even_cut(num_layers, num_parts) if isinstance(layers, str) else layers)
    if len(counts) != num_parts or min(counts) < 1 or sum(counts) != num_layers:
        part = "stage" if num_chunks == 1 else "virtual stage"
        raise UserError(
            f"parallelism.layers: got {counts}, expected {num_parts} positive counts (one per "
            f"{part}) that sum to the model's {num_layers} layers"
        )
    return tuple(range(start, end) for start, end in pairwise(accumulate(counts, initial=0)))


def _check_chunks(
    num_layers: int, num_stages: int, num_chunks: int, layers: str | Sequence[int]
) -> None:
    num_parts = num_stages * num_chunks
    got = f"got {num_chunks} chunks on each of {num_stages} stages"
    if num_parts > num_layers:
        raise UserError(
            f"parallelism.chunks: {got}, expected at most as many virtual stages in all as the "
            f"model's {num_layers} layers"
        )
    if isinstance(layers, str) and num_layers % num_parts:
        raise UserError(
            f"parallelism.chunks: {got}, expected the model's {num_layers} layers to be a multiple "
            f"of {num_parts}, or a list in parallelism.layers"
        )


def partition(
    layer_costs_ms: Sequence[float],
    first_extra_ms: float,
    last_extra_ms: float,
    num_stages: int,
) -> tuple[int, ...]:
    """The number of layers per stage, at least 1, that makes the slowest stage fastest; exact.

    Among equal cuts it takes the one whose stages' times differ least (the least sum of squares),
    then the one nearest to the even cut, then the one with fewer layers on earlier stages, which
    hold the most microbatches.

    Args:
        first_extra_ms: Further time of the first stage, such as the embedding.
        last_extra_ms: Further time of the last stage, such as the head.

    Raises:
        ValueError: Fewer layers than stages, or no stages.
    """
    even = even_cut(len(layer_costs_ms), num_stages)
    # Whole picoseconds, so that equal cuts compare equal on every machine.
    ends = list(accumulate(map(_picoseconds, layer_costs_ms), initial=0))
    extras = [0] * num_stages
    extras[0] += _picoseconds(first_extra_ms)
    extras[-1] += _picoseconds(last_extra_ms)
    return _most_even(ends, extras, even, _fastest_slowest(ends, extras))


def even_cut(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Equal numbers of layers for all stages; the rest goes to the stages in the middle.

    Raises:
        ValueError: Fewer layers than stages, or no stages.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"num_stages: got {num_stages}, expected between 1 and the {num_layers} layers"
        )
    share, left_over = divmod(num_layers, num_stages)
    first = (num_stages - left_over) // 2
    return tuple(share + (first <= stage < first + left_over) for stage in range(num_stages))


def stage_times_ms(
    layers: Sequence[int],
    layer_costs_ms: Sequence[float],
    first_extra_ms: float,
    last_extra_ms: float,
) -> tuple[float, ...]:
    """The time of each stage, given its number of layers, in milliseconds."""
    bounds = pairwise(accumulate(layers, initial=0))
    times_ms = [sum(layer_costs_ms[start:end]) for start, end in bounds]
    times_ms[0] += first_extra_ms
    times_ms[-1] += last_extra_ms
    return tuple(times_ms)


def _fastest_slowest(ends: Sequence[int], extras: Sequence[int]) -> int:
    """The time of the slowest stage under the best cut."""
    num_layers = len(ends) - 1
    # best[n]: the slowest of the stages so far when they hold the first n layers.
    best: list[int | None] = [0, *[None] * num_layers]
    for extra in extras:
        best = [
            min(
                (
                    max(before, ends[end] - ends[start] + extra)
                    for start, before in enumerate(best[:end])
                    if before is not None
                ),
                default=None,
            )
            for end in range(num_layers + 1)
        ]
    slowest = best[num_layers]
    assert slowest is not None  # there are at least as many layers as stages
    return slowest


def _most_even(
    ends: Sequence[int], extras: Sequence[int], even: Sequence[int], slowest: int
) -> tuple[int, ...]:
    """Of the cuts with no stage slower than ``slowest``, the one that ``partition`` chooses."""
    num_layers = len(ends) - 1
    best: list[_Key | None] = [(0, 0, ()), *[None] * num_layers]
    for extra, usual in zip(extras, even, strict=True):
        following: list[_Key | None] = [None] * (num_layers + 1)
        for end in range(1, num_layers + 1):
            keys: list[_Key] = []
            for start in range(end - 1, -1, -1):
                time = ends[end] - ends[start] + extra
                if time > slowest:
                    break  # more layers are only slower
                if (before := best[start]) is not None:
                    squares, distance, layers = before
                    count = end - start
                    unusual = distance + abs(count - usual)
                    keys.append((squares + time * time, unusual, (*layers, count)))
            following[end] = min(keys, default=None)
        best = following
    found = best[num_layers]
    assert found is not None  # the cut that gave ``slowest`` is one
    return found[2]


def _picoseconds(duration_ms: float) -> int:
    return round(duration_ms * _PICOSECONDS_PER_MS)
