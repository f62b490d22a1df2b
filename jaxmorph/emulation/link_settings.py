"""Reads the conditions of emulated links from a configuration."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from jaxmorph.config import Config
from jaxmorph.config.link_problems import possible_links
from jaxmorph.config.link_sections import EmulatedLink, Emulation, LinkTrace
from jaxmorph.emulation.delay_traces import draw_regime
from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.emulation.link_trace import read_link_trace, require_few_changes, require_links_of
from jaxmorph.errors import UserError
from jaxmorph.placement import ALONE, Layout, Placement, Replica
from jaxmorph.records import Link


def trace_conditions(
    trace: LinkTrace | None,
    num_stages: int,
    key: str,
    draw: int = 0,
    replica: Replica = ALONE,
) -> tuple[LinkCondition, ...]:
    """A trace's conditions in one replica, one for each change of each link, scaled as configured.

    Args:
        key: The trace's key in the configuration, for errors.
        draw: Added to the seed of a regime.

    Raises:
        UserError: The file can't be read, names a link that the pipeline doesn't have, or a link
            changes more often than one record to a sidecar can hold.
    """
    if trace is None:
        return ()
    if trace.file is not None:
        found = _read(trace.file, num_stages, key, replica)
    elif trace.regime is not None:
        links, seed = Placement(num_stages).links, trace.seed + draw
        drawn = draw_regime(trace.regime, links, trace.duration_s, seed, replica.index)
        found = drawn.conditions()
    else:
        raise ValueError(f"{key} has neither a file nor a regime")
    require_few_changes((Link(*each.between) for each in found), key)
    scaled = partial(_scaled, time_scale=trace.time_scale, latency_scale=trace.latency_scale)
    return tuple(map(scaled, found))


def _read(path: str, num_stages: int, key: str, replica: Replica) -> list[LinkCondition]:
    try:
        found = read_link_trace(path, replica)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    require_links_of(num_stages, (Link(*each.between) for each in found), f"{key}: {path}")
    return found


def _scaled(condition: LinkCondition, *, time_scale: float, latency_scale: float) -> LinkCondition:
    def time_s(value: float | None) -> float | None:
        return None if value is None else value * time_scale

    def step(value: int | None) -> int | None:
        return None if value is None else round(value * time_scale)

    return replace(
        condition,
        latency_ms=condition.latency_ms * latency_scale,
        jitter_ms=condition.jitter_ms * latency_scale,
        from_s=time_s(condition.from_s),
        to_s=time_s(condition.to_s),
        from_step=step(condition.from_step),
        to_step=step(condition.to_step),
    )


def emulated_conditions(
    config: Config, restarts: int = 0, layout: Layout | None = None, replica: int = 0
) -> tuple[LinkCondition, ...]:
    """The conditions of a replica's links: those that its configuration lists, and its trace's.

    Args:
        config: As the replica sees it.
        layout: Where each rank is; None: as at the start.

    Raises:
        UserError: The trace can't be read, or names a link that the pipeline doesn't have.
    """
    listed = [link_condition(link) for link in config.emulation.links]
    trace, cut = config.emulation.trace, config.parallelism
    own = {rank: stage for stage, rank in enumerate((layout or config.layout).ranks[replica])}
    hosts = _between_hosts(config, layout or config.layout, own)
    links = possible_links(cut.stages)
    listed += (each for each in hosts if Link(*each.between) in links)
    where = Replica(replica, cut.data)
    traced = trace_conditions(trace, cut.stages, "emulation.trace", replica=where)
    return _after_restarts((*listed, *traced), restarts)


def link_condition(link: EmulatedLink) -> LinkCondition:
    """The condition of a configured link, in the replica that has it."""
    return LinkCondition(**{name: value for name, value in link if name != "replica"})


def sum_conditions(
    config: Config, layout: Layout, stage: int, restarts: int = 0
) -> tuple[LinkCondition, ...]:
    """The conditions between the replicas' ranks of one stage, which sum gradients, by replica."""
    own = {rank: replica for replica, rank in enumerate(layout.peers(stage))}
    return _after_restarts(_between_hosts(config, layout, own), restarts)


def pair_conditions(
    config: Config, layout: Layout, ranks: tuple[int, int]
) -> tuple[LinkCondition, ...]:
    """The conditions between two ranks, numbered 0 and 1, wherever they are in the mesh."""
    return tuple(_between_hosts(config, layout, {rank: at for at, rank in enumerate(ranks)}))


def _between_hosts(
    config: Config, layout: Layout, numbers: Mapping[int, int]
) -> list[LinkCondition]:
    """The conditions of pairs of hosts, between those ranks that have a number."""
    return [
        LinkCondition(**{**dict(pair), "between": tuple(sorted((numbers[a], numbers[b])))})
        for pair in config.emulation.hosts
        for a, b in layout.between(pair.between)
        if a in numbers and b in numbers
    ]


def _after_restarts(found: Iterable[LinkCondition], restarts: int) -> tuple[LinkCondition, ...]:
    """The conditions, but no cuts after a restart: ranks would restart on what still works."""
    return tuple(each for each in found if not (restarts and each.cut))


def hardware_conditions(emulation: Emulation, num_stages: int) -> tuple[LinkCondition, ...]:
    """What messages cost on all links at any time: the wire, and if delegated the host copies."""
    if emulation.message_bytes is None:
        return ()
    return tuple(
        condition
        for link in possible_links(num_stages)
        for condition in (
            LinkCondition(
                (link.lower, link.upper),
                bandwidth_mbps=emulation.wire_mbps,
                message_bytes=emulation.message_bytes,
            ),
            LinkCondition(
                (link.lower, link.upper),
                host_copy_gbps=emulation.host_copy_gbps,
                route="delegated",
            ),
        )
    )
