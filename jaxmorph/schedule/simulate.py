"""Simulates when every op of a schedule runs, given costs and links, with or without jitter."""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

import numpy as np

from jaxmorph.placement import Place, Placement
from jaxmorph.records import Link
from jaxmorph.schedule.costs import NO_LATENCY, LinkDelay, Links, StageCosts
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.replay import (
    DirectionDelay,
    LinkModel,
    OutgoingDelays,
    StageTimes,
    outgoing,
    replay,
    stage_queues,
)
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.timeline import Timeline


def simulate(
    schedule: Schedule,
    costs: StageCosts,
    links: Links = NO_LATENCY,
    link_model: LinkModel = "latency",
    *,
    time_step_ms: float | None = None,
) -> Timeline:
    """Starts each op as soon as its stage is free and its data has arrived.

    Data arrives when its producer has ended, its message has got the link, and the link's occupancy
    and latency have passed. The result is exact: the longest path.

    Source: PipeMorph, Algorithm 4, which advances a clock by a time step. With ``time_step_ms``,
    every duration, latency and occupancy is rounded up to whole steps, so that no op ends earlier
    than in exact time. The paper counts a message's latency from its op's start; here it counts
    from the end, as data does not exist earlier.

    Args:
        costs: With V chunks, an op takes 1/V of these.
        links: With several chunks, link 0-(S-1) counts too.
        time_step_ms: Step of a discrete clock, milliseconds; None for exact time.

    Raises:
        ScheduleError: The schedule breaks a rule, or its stages wait for each other for ever.
        ValueError: Costs or links of another number of stages, a time step that is not above 0, or
            an unknown link model.
    """
    schedule.validate_rows()
    if costs.num_stages != schedule.num_stages:
        raise ValueError(f"got costs of {costs.num_stages} stages, expected {schedule.num_stages}")
    if time_step_ms is not None:
        links = links_in_whole_steps(links, time_step_ms)
    times = stage_times(costs, links, schedule.placement)
    if time_step_ms is not None:
        times = [StageTimes(*(in_whole_steps(ms, time_step_ms) for ms in row)) for row in times]
    delays = outgoing(links, schedule.placement)
    queues = stage_queues(delays, schedule.placement, link_model)
    ran = replay(schedule.orders, schedule.num_microbatches, schedule.placement, times, queues)
    schedule.require_complete(ran.ends)
    return Timeline(
        schedule.orders,
        tuple(np.array(starts, np.float64) for starts in ran.starts),
        tuple(np.array(ends, np.float64) for ends in ran.ends),
        placement_kind=schedule.placement_kind,
    )


def stage_times(
    costs: StageCosts, links: Links, placement: Placement | None = None
) -> list[StageTimes]:
    """Each virtual stage's times in milliseconds: durations of its ops, and delays of idle links.

    Args:
        placement: None: one chunk per rank.
    """
    placement = placement or Placement(costs.num_stages)
    chunks = placement.num_chunks
    return [
        StageTimes(
            costs.forward_ms[rank] / chunks,
            costs.backward_input_ms[rank] / chunks,
            costs.backward_weight_ms[rank] / chunks,
            delays.forward.total_ms,
            delays.backward.total_ms,
        )
        for (rank, _), delays in zip(placement.places(), outgoing(links, placement), strict=True)
    ]


_ROUNDING = 1e-9
"""Relative: a value this close to a whole number of steps counts as whole."""


def in_whole_steps(value_ms: float, step_ms: float) -> float:
    """A time rounded up to whole steps, and unchanged if it is whole already.

    Raises:
        ValueError: The step is not finite and above 0.
    """
    if not (math.isfinite(step_ms) and step_ms > 0):
        raise ValueError(f"time_step_ms: got {step_ms}, expected a finite number of ms above 0")
    steps = value_ms / step_ms
    if math.isclose(steps, round(steps), rel_tol=_ROUNDING):
        return value_ms
    return max(value_ms, math.ceil(steps) * step_ms)


def links_in_whole_steps(links: Links, step_ms: float) -> Links:
    """Links whose latencies and occupancies are rounded up to whole steps."""
    return {
        link: LinkDelay(*(in_whole_steps(getattr(delay, f.name), step_ms) for f in fields(delay)))
        for link, delay in links.items()
    }


def jittered_makespans_ms(
    schedule: Schedule,
    costs: StageCosts,
    links: Links,
    jitter_ms: Sequence[float],
    samples: int,
    seed: int,
) -> np.ndarray:
    """Makespans of steps in which each message's latency is drawn from max(0, Normal(c, sigma)).

    Draws are independent. A message (link direction, chunk and microbatch) draws the same values
    under every schedule, so that schedules compared with one seed meet the same delays.

    Args:
        links: Latencies are c; occupancies do not jitter.
        jitter_ms: sigma of each link between neighbours, for both directions, milliseconds. The
            wrap-around link 0-(S-1) of chunks jitters only on two stages, where it is one of these.

    Returns:
        Float64 ``[samples]``, milliseconds; without jitter, the result of ``simulate``.

    Raises:
        ScheduleError: The schedule breaks a rule, or its stages wait for each other for ever.
        ValueError: Costs, links or jitters of another number of stages, or a jitter that is
            negative or not finite.
    """
    schedule.validate_rows()
    if costs.num_stages != schedule.num_stages:
        raise ValueError(f"got costs of {costs.num_stages} stages, expected {schedule.num_stages}")
    sigmas = _jitter_of_links(jitter_ms, schedule.num_stages)
    delays = outgoing(links, schedule.placement)
    up, down = _messages(delays, sigmas, schedule.placement, samples, seed)
    times = stage_times(costs, links, schedule.placement)
    clocks = np.zeros((schedule.num_stages, samples))
    for stage, op in _in_dependency_order(schedule):
        virtual = schedule.placement.virtual_stage(Place(stage, op.chunk))
        match op.kind:
            case OpKind.F:
                _run(clocks[stage], times[virtual].forward, up[virtual], up[virtual + 1])
            case OpKind.W:
                clocks[stage] += op.group * times[virtual].backward_weight
            case _:
                duration = times[virtual].backward_input
                if op.kind is OpKind.BW:
                    duration += times[virtual].backward_weight
                _run(clocks[stage], duration, down[virtual + 1], down[virtual])
    return clocks.max(axis=0)


class _Messages:
    """Messages from one virtual stage to the next, in microbatch order, in all samples.

    Args:
        delays: Each message's delay, milliseconds: ``[samples]``, or one number for all.
        free_at: Float64 ``[samples]``: when the link direction is free; shared by all its senders.
    """

    def __init__(
        self, delays: Iterator[np.ndarray | float], occupancy_ms: float, free_at: np.ndarray
    ) -> None:
        self._delays = delays
        self._occupancy_ms = occupancy_ms
        self._free_at = free_at
        self._arrivals: deque[np.ndarray] = deque()

    def send(self, at: np.ndarray) -> None:
        if self._occupancy_ms:
            at = np.maximum(at, self._free_at)
            self._free_at[:] = at + self._occupancy_ms
        self._arrivals.append(at + next(self._delays))

    def receive(self) -> np.ndarray:
        return self._arrivals.popleft()


def _run(
    clock: np.ndarray, duration_ms: float, source: _Messages | None, target: _Messages | None
) -> None:
    """Moves a stage's clock, in place, past an op that may receive a message and may send one."""
    if source is not None:
        np.maximum(clock, source.receive(), out=clock)
    clock += duration_ms
    if target is not None:
        target.send(clock)


def _in_dependency_order(schedule: Schedule) -> list[tuple[int, Op]]:
    """All ops with their stages, each after its dependencies."""
    ran = replay(schedule.orders, schedule.num_microbatches, schedule.placement)
    schedule.require_complete(ran.ends)
    started = [
        (start, stage, op)
        for stage, (order, starts) in enumerate(zip(schedule.orders, ran.starts, strict=True))
        for op, start in zip(order, starts, strict=True)
    ]
    return [(stage, op) for _, stage, op in sorted(started, key=lambda op: op[0])]


def _jitter_of_links(jitter_ms: Sequence[float], num_stages: int) -> dict[Link, float]:
    if len(jitter_ms) != num_stages - 1:
        raise ValueError(
            f"jitter_ms: got {len(jitter_ms)} values, expected {num_stages - 1} (one per link)"
        )
    for link, sigma in enumerate(jitter_ms):
        if not (math.isfinite(sigma) and sigma >= 0):
            raise ValueError(f"jitter_ms[{link}]: got {sigma}, expected a finite number of ms >= 0")
    return {Link(stage, stage + 1): sigma for stage, sigma in enumerate(jitter_ms)}


def _messages(
    delays: Sequence[OutgoingDelays],
    sigmas: Mapping[Link, float],
    placement: Placement,
    samples: int,
    seed: int,
) -> tuple[list[_Messages | None], list[_Messages | None]]:
    """The messages up to, and down from, each virtual stage; None at the ends of the pipeline."""
    free_at = defaultdict[tuple[int, int], np.ndarray](lambda: np.zeros(samples))
    up: list[_Messages | None] = [None]
    down: list[_Messages | None] = [None]
    for virtual, (below, here) in enumerate(placement.hops(), start=1):
        sigma = sigmas.get(Link.of(below.rank, here.rank), 0.0)
        for messages, sender, receiver, delay in (
            (up, below, here, delays[virtual - 1].forward),
            (down, here, below, delays[virtual].backward),
        ):
            random = np.random.default_rng((seed, virtual, messages is up))
            drawn = _drawn_delays(delay, sigma, samples, random)
            free = free_at[sender.rank, receiver.rank]
            messages.append(_Messages(drawn, delay.occupancy_ms, free))
    return [*up, None], [*down, None]


def _drawn_delays(
    delay: DirectionDelay, sigma: float, samples: int, random: np.random.Generator
) -> Iterator[np.ndarray | float]:
    while True:
        latency = delay.latency_ms
        if sigma:
            latency = np.maximum(0.0, latency + sigma * random.standard_normal(samples))
        yield delay.occupancy_ms + latency
