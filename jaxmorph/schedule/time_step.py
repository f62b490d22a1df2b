"""Times as a discrete clock sees them: rounded up to whole steps."""

import math
from dataclasses import fields

from jaxmorph.schedule.costs import Links, LinkState

_ROUNDING = 1e-9
"""Relative: a value this close to a whole number of steps differs by floating point alone."""


def in_whole_steps(value_ms: float, step_ms: float) -> float:
    """The least whole number of steps that is no shorter than a time.

    Args:
        value_ms: A time, milliseconds; returned as it is when it already is a whole number.
        step_ms: Length of a step, milliseconds.

    Returns:
        The rounded time, milliseconds; never below ``value_ms``.

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
    """Links whose latencies and occupancies are rounded up to whole steps.

    Args:
        links: State of the links, milliseconds.
        step_ms: Length of a step, milliseconds.

    Returns:
        The same links, rounded.

    Raises:
        ValueError: The step is not finite and above 0.
    """
    return {
        link: LinkState(*(in_whole_steps(getattr(state, f.name), step_ms) for f in fields(state)))
        for link, state in links.items()
    }
