"""Orders of direct transfers for ranks with chunks, whose chain of stages closes to a ring."""

from collections.abc import Iterator

from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.instructions import RankProgram
from jaxmorph.program.lowering import lower
from jaxmorph.schedule.costs import Link, Links, LinkState, Routes, StageCosts
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate
from jaxmorph.schedule.timeline import Timeline


def lower_in_step(
    schedule: Schedule, costs: StageCosts, links: Links, routes: Routes, *, num_tied: int = 0
) -> tuple[RankProgram, ...]:
    """Every rank's instructions for one step, in which ranks wait little for each other.

    When all run as early as they can, each rank is one forward behind the rank before it: with one
    chunk, ops of neighbours end together. Around a ring the delays add up, and unless they come to
    whole turns of forward and backward, transfers between the last rank and the first fall into the
    middle of each other's ops, turn after turn. Planned with a message that takes as long as a
    forward, all ranks keep time, for a longer warm-up. Which of the two is shorter, a simulation of
    the programs tells.

    Args:
        schedule: Which ops each rank runs, in which order.
        costs: Durations of the ops, milliseconds.
        links: States of the links that count in the order of transfers.
        routes: The route of each link; a link that is not named is direct.
        num_tied: How many parameters the first and the last stage both hold a copy of.

    Returns:
        One program per rank; with one chunk, those of the schedule as early as it can run.
    """
    lowered = [
        lower(schedule, planned, routes, num_tied=num_tied)
        for planned in _planned(schedule, costs, links, routes)
    ]
    if len(lowered) == 1:
        return lowered[0]
    return min(lowered, key=lambda programs: simulate_blocking(programs, costs, links).makespan_ms)


def _planned(
    schedule: Schedule, costs: StageCosts, links: Links, routes: Routes
) -> Iterator[Timeline]:
    yield simulate(schedule, costs, links)
    ring = range(schedule.num_stages)
    if schedule.num_chunks == 1 or len(ring) == 1:
        return
    forward_ms = max(costs.forward_ms) / schedule.num_chunks
    pairs = (sorted((rank, (rank + 1) % len(ring))) for rank in ring)
    direct = [link for link in map(Link._make, pairs) if routes.get(link, "direct") == "direct"]
    yield simulate(
        schedule, costs, {**links, **dict.fromkeys(direct, LinkState(forward_ms, forward_ms))}
    )
