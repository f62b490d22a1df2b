"""What properties are tried on: costs, links and caps of a number of stages."""

from hypothesis import strategies as st

from jaxmorph.records import Link
from jaxmorph.schedule.costs import Limits, LinkDelay, StageCosts, StashBytes


def costs_of(stages: int, ms: st.SearchStrategy[float]) -> st.SearchStrategy[StageCosts]:
    """Costs of stages whose ops take these times."""
    row = st.tuples(*[ms] * stages)
    return st.builds(StageCosts, row, row, row)


@st.composite
def links_of(draw, stages: int, ms: st.SearchStrategy[float]) -> dict[Link, LinkDelay]:
    """Links between neighbours, each direction with a latency of its own, or not there."""
    return {
        Link(stage, stage + 1): LinkDelay(draw(ms), draw(ms))
        for stage in range(stages - 1)
        if draw(st.booleans())
    }


@st.composite
def limits_of(draw, stages: int, most_live=9, most_bytes=3, most_spare=9) -> Limits:
    """No caps, caps in microbatches, or caps in bytes that at least one microbatch fits."""
    if draw(st.booleans()):
        caps = draw(st.none() | st.tuples(*[st.integers(1, most_live)] * stages))
        return Limits(caps, draw(st.sampled_from(["B", "W"])))
    sizes = [draw(st.tuples(*[st.integers(0, most_bytes)] * stages)) for _ in range(2)]
    spare = draw(st.tuples(*[st.integers(0, most_spare)] * stages))
    room = tuple(map(sum, zip(map(max, *sizes), spare, strict=True)))
    return Limits(max_stash_bytes=room, stash_bytes=StashBytes(*sizes))
