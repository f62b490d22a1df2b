"""When every op of a schedule would run, given costs and links."""

import numpy as np

from jaxmorph.schedule.costs import NO_LATENCY, Links, StageCosts
from jaxmorph.schedule.link_models import LinkModel, StageQueues, outgoing, stage_queues
from jaxmorph.schedule.replay import StageTimes, replay
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.time_step import in_whole_steps, links_in_whole_steps
from jaxmorph.schedule.timeline import Timeline


def simulate(
    schedule: Schedule,
    costs: StageCosts,
    links: Links = NO_LATENCY,
    link_model: LinkModel = "latency",
    *,
    time_step_ms: float | None = None,
) -> Timeline:
    """Runs a schedule on paper: each op starts as soon as its stage is free and its data is there.

    Data is there when the op that produced it has ended, its message has got the link, and the
    link's occupancy and latency have passed. The result is exact: only the longest path.

    Source: PipeMorph, Algorithm 4, which advances a clock by a time step. With ``time_step_ms``
    every op's duration, every latency and every occupancy is rounded up to whole steps, each by
    itself, so that ops start at ticks of such a clock only: none ends earlier than in exact time,
    and all at the same time if all are whole. The paper counts a message's latency from its op's
    start; here it is from its end.

    Args:
        schedule: What every stage runs, in which order.
        costs: Durations of the ops, milliseconds; an op of one of V chunks takes 1/V of them.
        links: State of the links, milliseconds; with several chunks also of link 0-(S-1).
        link_model: Whether a message occupies its link direction for its occupancy alone
            (``latency``) or until it has arrived (``serialized``).
        time_step_ms: Step of a discrete clock, milliseconds; None for exact time.

    Returns:
        Start and end of every op.

    Raises:
        ScheduleError: The schedule breaks a rule, or its stages wait for each other for ever.
        ValueError: Costs or links are of another number of stages, a time step is not above 0, or
            there is no such link model.
    """
    schedule.validate_rows()
    if costs.num_stages != schedule.num_stages:
        raise ValueError(f"got costs of {costs.num_stages} stages, expected {schedule.num_stages}")
    if time_step_ms is not None:
        links = links_in_whole_steps(links, time_step_ms)
    times = stage_times(costs, links, schedule.num_chunks)
    if time_step_ms is not None:
        times = [StageTimes(*(in_whole_steps(ms, time_step_ms) for ms in row)) for row in times]
    ways = outgoing(links, schedule.num_stages, schedule.num_chunks)
    queues = stage_queues(ways, link_model)
    return _timeline(schedule, times, queues)


def _timeline(
    schedule: Schedule, times: list[StageTimes], queues: list[StageQueues] | None
) -> Timeline:
    ran = replay(
        schedule.orders,
        schedule.num_microbatches,
        times,
        num_chunks=schedule.num_chunks,
        queues=queues,
    )
    schedule.require_complete(ran.ends)
    return Timeline(
        schedule.orders,
        tuple(np.array(starts, np.float64) for starts in ran.starts),
        tuple(np.array(ends, np.float64) for ends in ran.ends),
    )


def stage_times(costs: StageCosts, links: Links, num_chunks: int = 1) -> list[StageTimes]:
    """Each stage's durations, and how late what it sends up (F) and down (B) arrives.

    Args:
        costs: Durations of the ops, milliseconds.
        links: State of the links, milliseconds.
        num_chunks: Number of virtual stages each stage runs.

    Returns:
        One record per stage, milliseconds: durations of one chunk's ops, and occupancy and latency
        of an idle link. With one chunk, the ends of the chain send without delay.
    """
    rows = zip(
        costs.forward_ms,
        costs.backward_input_ms,
        costs.backward_weight_ms,
        outgoing(links, costs.num_stages, num_chunks),
        strict=True,
    )
    return [
        StageTimes(
            forward_ms / num_chunks,
            backward_input_ms / num_chunks,
            backward_weight_ms / num_chunks,
            ways.forward.delay_ms,
            ways.backward.delay_ms,
        )
        for forward_ms, backward_input_ms, backward_weight_ms, ways in rows
    ]
