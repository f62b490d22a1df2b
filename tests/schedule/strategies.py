"""Strategies for planning problems: costs, links, caps and workloads."""

from hypothesis import strategies as st

from jaxmorph.records import Link
from jaxmorph.schedule.costs import Limits, LinkDelay, StageCosts, StashBytes
from jaxmorph.schedule.list_schedule import Workload


def costs_of(stages: int, ms: st.SearchStrategy[float]) -> st.SearchStrategy[StageCosts]:
    """Costs of stages whose ops take drawn times."""
    row = st.tuples(*[ms] * stages)
    return st.builds(StageCosts, row, row, row)


@st.composite
def links_of(draw, stages: int, ms: st.SearchStrategy[float]) -> dict[Link, LinkDelay]:
    """Links between neighbours, each direction with its own latency; some are missing."""
    return {
        Link(stage, stage + 1): LinkDelay(draw(ms), draw(ms))
        for stage in range(stages - 1)
        if draw(st.booleans())
    }


@st.composite
def limits_of(draw, stages: int, most_live=9, most_bytes=3, most_spare=9) -> Limits:
    """No caps, caps in microbatches, or caps in bytes with room for one microbatch."""
    if draw(st.booleans()):
        caps = draw(st.none() | st.tuples(*[st.integers(1, most_live)] * stages))
        return Limits(caps, draw(st.sampled_from(["B", "W"])))
    sizes = [draw(st.tuples(*[st.integers(0, most_bytes)] * stages)) for _ in range(2)]
    spare = draw(st.tuples(*[st.integers(0, most_spare)] * stages))
    room = tuple(map(sum, zip(map(max, *sizes), spare, strict=True)))
    return Limits(max_stash_bytes=room, stash_bytes=StashBytes(*sizes))


def workload_of(
    count: int,
    durations: list[tuple[int, int, int]],
    latencies: list[tuple[int, int]] | None = None,
    memory: list[tuple[int, int, int]] | None = None,
) -> Workload:
    """Of each stage (F, B, W), of each link (forward, backward), of each stage (a, b, room)."""
    delays = latencies or [(0, 0)] * (len(durations) - 1)
    up, down = (*(delay for delay, _ in delays), 0), (0, *(delay for _, delay in delays))
    forward, backward_input, backward_weight = zip(*durations, strict=True)
    holds = zip(*(memory or [(1, 0, count)] * len(durations)), strict=True)
    after_forward, after_backward, room = holds
    times = forward, backward_input, backward_weight
    return Workload(count, *times, up, down, after_forward, after_backward, room)


@st.composite
def workloads(draw, most_stages=5, most_microbatches=8) -> Workload:
    """Workloads of small whole times, so that events often coincide."""
    stages, time = draw(st.integers(1, most_stages)), st.integers(0, 4)
    holds = st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 8))
    memory = draw(st.lists(holds, min_size=stages, max_size=stages))
    return workload_of(
        draw(st.integers(1, most_microbatches)),
        draw(st.lists(st.tuples(time, time, time), min_size=stages, max_size=stages)),
        draw(st.lists(st.tuples(time, time), min_size=stages - 1, max_size=stages - 1)),
        [(a, b, max(a, b) + spare) for a, b, spare in memory],
    )
