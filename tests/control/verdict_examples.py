"""Verdicts on links, as detection makes them."""

from jaxmorph.control.link_state import LinkHealth, PathState
from jaxmorph.control.verdicts import Evidence, Verdict


def verdict(
    source,
    destination,
    latency_ms,
    health=LinkHealth.SLOW,
    *,
    healthy_ms=1.1,
    jitter=0.0,
    path=PathState.UP,
):
    evidence = Evidence((latency_ms,) * 3, healthy_ms, 0.2, healthy_ms + 5.0)
    words = f"link {source}>{destination} takes {latency_ms} ms"
    ends = source, destination
    return Verdict(*ends, health, latency_ms, jitter, 6, evidence, words, path)


def both_ways(lower, upper, latency_ms, health=LinkHealth.SLOW, path=PathState.UP):
    return (
        verdict(lower, upper, latency_ms, health, path=path),
        verdict(upper, lower, latency_ms, health, path=path),
    )


def healthy(num_stages, but=()):
    """Healthy links between neighbours, except some."""
    pairs = [(stage, stage + 1) for stage in range(num_stages - 1)]
    return tuple(
        each
        for pair in pairs
        if pair not in but
        for each in both_ways(*pair, 1.1, LinkHealth.HEALTHY)
    )
