"""A problem's links: from its fields, per link or one number for all, to their states."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxmorph.schedule.costs import Link, Links, LinkState
from jaxmorph.schedule.fields import durations_ms

LINK_FIELDS = (
    "planned_link_ms",
    "link_forward_ms",
    "link_backward_ms",
    "link_occupancy_ms",
    "link_jitter_ms",
)
"""The optional fields of a problem that tell of its links, beside ``link_ms``."""

MARGIN_OF_JITTER = 0.7
"""A link that jitters is planned for at its latency and this many standard deviations.

Beyond the nominal latency a late message spreads over the step, while a margin that is not needed
costs only memory.
"""


@dataclass(frozen=True)
class ProblemLinks:
    """The links of a problem, as they are and as the planner takes them.

    Args:
        planned: The links to plan for: those given as such, else the simulated ones with a margin
            for jitter.
        jitter_ms: Standard deviation of the latency of each link between neighbours, milliseconds;
            None when it was not given.
    """

    simulated: Links
    planned: Links
    jitter_ms: tuple[float, ...] | None


def pipeline_links(num_stages: int, num_chunks: int = 1) -> tuple[Link, ...]:
    """The links that activations and gradients take.

    Args:
        num_chunks: Number of virtual stages each runs.

    Returns:
        Links 0-1, 1-2, ...; with several chunks then 0-(S-1), unless that is link 0-1 itself.
    """
    chain = tuple(Link(stage, stage + 1) for stage in range(num_stages - 1))
    wraps = num_chunks > 1 and num_stages > 2
    return (*chain, Link(0, num_stages - 1)) if wraps else chain


def parse_links(fields: Mapping[str, Any], num_stages: int, num_chunks: int) -> ProblemLinks:
    """Reads a problem's fields about links.

    Args:
        fields: The problem's fields; ``link_ms`` must be there. A list has one number for each of
            ``pipeline_links``, where the link around may be left out and delays nothing then; that
            of ``link_jitter_ms`` has one for each pair of neighbours.
        num_chunks: Number of virtual stages each runs.

    Returns:
        The links.

    Raises:
        UserError: Names the field, what was got and what was expected.
    """
    links = pipeline_links(num_stages, num_chunks)

    def given(field: str, fallback: tuple[float, ...]) -> tuple[float, ...]:
        value = fields.get(field)
        if isinstance(value, list) and len(value) == num_stages - 1 < len(links):
            value = [*value, 0.0]
        return fallback if value is None else durations_ms(field, value, len(links), "link")

    both = given("link_ms", ())
    occupancy = given("link_occupancy_ms", (0.0,) * len(links))
    forward, backward = given("link_forward_ms", both), given("link_backward_ms", both)
    simulated = _states(links, forward, backward, occupancy)
    jitter = _jitter(fields.get("link_jitter_ms"), num_stages)
    planned = _with_margin(simulated, jitter or ())
    if fields.get("planned_link_ms") is not None:
        believed = given("planned_link_ms", ())
        planned = _states(links, believed, believed, occupancy)
    return ProblemLinks(simulated, planned, jitter)


def _states(links: tuple[Link, ...], *columns: tuple[float, ...]) -> dict[Link, LinkState]:
    forward, backward, occupancy = columns
    rows = zip(links, forward, backward, occupancy, occupancy, strict=True)
    return {link: LinkState(*state) for link, *state in rows}


def _jitter(value: object, num_stages: int) -> tuple[float, ...] | None:
    if value is None:
        return None
    return durations_ms("link_jitter_ms", value, num_stages - 1, "pair of neighbours")


def _with_margin(links: Links, jitter_ms: tuple[float, ...]) -> Links:
    margins = {
        Link(stage, stage + 1): MARGIN_OF_JITTER * sigma for stage, sigma in enumerate(jitter_ms)
    }
    return {link: _slower(state, margins.get(link, 0.0)) for link, state in links.items()}


def _slower(state: LinkState, by_ms: float) -> LinkState:
    return replace(
        state,
        forward_latency_ms=state.forward_latency_ms + by_ms,
        backward_latency_ms=state.backward_latency_ms + by_ms,
    )
