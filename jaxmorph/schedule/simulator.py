"""When every op of a schedule would run, given costs and link latencies."""

import numpy as np

from jaxmorph.schedule.costs import NO_LATENCY, Links, StageCosts, neighbour_links
from jaxmorph.schedule.replay import StageTimes, replay
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.timeline import Timeline


def simulate(schedule: Schedule, costs: StageCosts, links: Links = NO_LATENCY) -> Timeline:
    """Runs a schedule on paper: each op starts as soon as its stage is free and its data is there.

    Data is there when the op that produced it has ended and the link's latency has passed;
    messages on a link overlap. The result is exact: no time step, only the longest path.

    Args:
        schedule: What every stage runs, in which order.
        costs: Durations of the ops, milliseconds.
        links: Latencies between neighbouring stages, milliseconds.

    Returns:
        Start and end of every op.

    Raises:
        ScheduleError: The schedule breaks a rule, or its stages wait for each other for ever.
        ValueError: Costs or links are of another number of stages.
    """
    schedule.validate_rows()
    times = stage_times(costs, links)
    if len(times) != schedule.num_stages:
        raise ValueError(f"got costs of {len(times)} stages, expected {schedule.num_stages}")
    ran = replay(schedule.orders, schedule.num_microbatches, times)
    schedule.require_complete(ran.ends)
    return Timeline(
        schedule.orders,
        tuple(np.array(starts, np.float64) for starts in ran.starts),
        tuple(np.array(ends, np.float64) for ends in ran.ends),
    )


def stage_times(costs: StageCosts, links: Links) -> list[StageTimes]:
    """Each stage's durations, and the latencies of what it sends up (F) and down (B).

    Args:
        costs: Durations of the ops, milliseconds.
        links: Latencies between neighbouring stages, milliseconds.

    Returns:
        One record per stage, milliseconds; the ends of the chain send without latency.
    """
    chain = neighbour_links(links, costs.num_stages)
    forward = [*(link.forward_latency_ms for link in chain), 0.0]
    backward = [0.0, *(link.backward_latency_ms for link in chain)]
    rows = zip(
        costs.forward_ms,
        costs.backward_input_ms,
        costs.backward_weight_ms,
        forward,
        backward,
        strict=True,
    )
    return [StageTimes(*row) for row in rows]
