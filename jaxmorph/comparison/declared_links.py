"""What a condition of links declares: to those who emulate it, plan for it or predict under it."""

import math
from collections.abc import Mapping, Sequence

from jaxmorph.config.compare_section import Condition
from jaxmorph.schedule.costs import Link, Links, LinkState
from jaxmorph.transport.link_emulator import LinkCondition


def link_conditions(condition: Condition) -> tuple[LinkCondition, ...]:
    """A configured condition as those who emulate links are told of it."""
    return tuple(LinkCondition(**dict(link)) for link in condition.links)


def declared_states(
    conditions: Sequence[LinkCondition], message_bytes: int, margin_of_jitter: float = 0.0
) -> dict[Link, LinkState]:
    """What links that behave as told do to messages.

    Args:
        conditions: How links behave; spans of steps and times are not looked at.
        message_bytes: Length of an activation or a gradient.
        margin_of_jitter: How many standard deviations of a link's jitter to add to its latency.

    Returns:
        The state of each link that a condition names.
    """
    states: dict[Link, LinkState] = {}
    for link in sorted({Link(*condition.between) for condition in conditions}):
        own = [condition for condition in conditions if Link(*condition.between) == link]
        up, down = (
            _direction_ms([c for c in own if c.source in (None, source)], margin_of_jitter)
            for source in link
        )
        occupied = (_occupancy_ms(own, source, message_bytes) for source in link)
        states[link] = LinkState(up, down, *occupied)
    return states


def delayed(links: Links, added: Mapping[Link, LinkState]) -> dict[Link, LinkState]:
    """Links with delays on top of what they have.

    Args:
        added: What each of some links gets on top.
    """
    both = dict(links)
    for link, more in added.items():
        own = both.get(link, LinkState())
        both[link] = LinkState(
            own.forward_latency_ms + more.forward_latency_ms,
            own.backward_latency_ms + more.backward_latency_ms,
            own.forward_occupancy_ms + more.forward_occupancy_ms,
            own.backward_occupancy_ms + more.backward_occupancy_ms,
        )
    return both


def _direction_ms(conditions: Sequence[LinkCondition], margin: float) -> float:
    jitter_ms = math.hypot(*(condition.jitter_ms for condition in conditions))
    latency_ms = math.fsum(condition.latency_ms for condition in conditions)
    return max(0.0, latency_ms + margin * jitter_ms)


def _occupancy_ms(conditions: Sequence[LinkCondition], source: int, message_bytes: int) -> float:
    limits = [
        condition.bandwidth_mbps
        for condition in conditions
        if condition.source in (None, source) and condition.bandwidth_mbps is not None
    ]
    return 8e-3 * message_bytes / min(limits) if limits else 0.0
