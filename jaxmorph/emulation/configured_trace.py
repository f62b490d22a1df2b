"""A trace that a configuration names, as those who emulate links are told it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from jaxmorph.config.sections import LinkTrace
from jaxmorph.emulation.delay_traces import Regime, draw_regime
from jaxmorph.emulation.trace_limits import require_few_changes, require_links_of
from jaxmorph.errors import UserError
from jaxmorph.schedule.costs import Link
from jaxmorph.schedule.problem_links import pipeline_links
from jaxmorph.transport.link_emulator import LinkCondition
from jaxmorph.transport.link_trace import read_link_trace


def trace_conditions(
    trace: LinkTrace | None, num_stages: int, key: str, draw: int = 0
) -> tuple[LinkCondition, ...]:
    """How links behave by a trace.

    Args:
        trace: The configuration's, if there is one.
        key: Where it stands in the configuration, for errors.
        draw: Which draw of a regime: its seed is so much higher.

    Returns:
        A condition for each change of each link, scaled as configured.

    Raises:
        UserError: If the file can't be read, or names a link that the pipeline doesn't have, or a
            link changes more often than a rank's end of the data plane can be told.
    """
    if trace is None:
        return ()
    if trace.file is not None:
        found = _read(trace.file, num_stages, key)
    elif trace.regime is not None:
        found = _drawn(trace.regime, num_stages, trace.duration_s, trace.seed + draw)
    else:
        raise ValueError(f"{key} has neither a file nor a regime")
    require_few_changes((Link(*each.between) for each in found), key)
    scaled = partial(_scaled, time_scale=trace.time_scale, latency_scale=trace.latency_scale)
    return tuple(map(scaled, found))


def begun_at(conditions: Sequence[LinkCondition], step: int) -> tuple[LinkCondition, ...]:
    """Conditions whose steps are counted from another one than the first.

    Args:
        conditions: By steps, by time or by neither.
        step: What their step 0 becomes.
    """

    def later(first: int | None) -> int | None:
        return None if first is None else first + step

    return tuple(
        replace(each, from_step=later(each.from_step), to_step=later(each.to_step))
        for each in conditions
    )


def _read(path: str, num_stages: int, key: str) -> list[LinkCondition]:
    try:
        found = read_link_trace(path)
    except UserError as error:
        raise UserError(f"{key}: {error}") from error
    require_links_of(num_stages, (Link(*each.between) for each in found), f"{key}: {path}")
    return found


def _drawn(regime: Regime, num_stages: int, duration_s: float, seed: int) -> list[LinkCondition]:
    return draw_regime(regime, pipeline_links(num_stages), duration_s, seed).conditions()


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
