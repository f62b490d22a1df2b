"""Judges the runs of a comparison by the bars of its configuration."""

from collections.abc import Mapping

from jaxmorph.config.compare_section import (
    HEALTHY,
    LOWER_BOUND,
    PREDICTION,
    SYSTEM_NAMES,
    Bar,
    Compare,
)
from jaxmorph.report.run_matrix import JudgedBar, Run

Runs = Mapping[tuple[str, str], Run]


def judge(compare: Compare, runs: Runs) -> tuple[JudgedBar, ...]:
    """All bars on systems that are compared, in the order of the configuration."""
    others = {*SYSTEM_NAMES} - {*compare.systems}  # such as those that a command line leaves out
    everywhere = tuple(condition.name for condition in compare.conditions)
    return tuple(
        JudgedBar(
            system=system,
            condition=condition,
            value=bar.value,
            over=bar.over,
            at_least=bar.at_least,
            at_most=bar.at_most,
            measured=_ratio(bar, system, condition, compare.healthy, runs),
        )
        for bar in compare.bars
        if bar.over not in others
        for condition in bar.conditions or everywhere
        for system in bar.systems
        if system not in others
    )


def _ratio(bar: Bar, system: str, condition: str, healthy: str | None, runs: Runs) -> float | None:
    """The value that a bar limits; None if a run is missing, incomplete or failed."""
    own = runs.get((system, condition))
    value, base = _value(own, bar.value), None
    if value is None or own is None or bar.over is None:
        return value
    if bar.over in (PREDICTION, LOWER_BOUND):
        if own.plan is not None:
            is_bound = bar.over == LOWER_BOUND
            base = own.plan.lower_bound_ms if is_bound else own.plan.predicted_ms
    elif bar.over == HEALTHY:
        base = None if healthy is None else _value(runs.get((system, healthy)), bar.value)
    else:
        base = _value(runs.get((bar.over, condition)), bar.value)
    return value / base if base else None


def _value(run: Run | None, name: str) -> float | None:
    """One of a run's values, as `Bar.value` names them; None if not all of it is measured."""
    if run is None or run.failed or run.blocks_to_come:
        return None
    match name:
        case "step":
            return run.step_ms.median if run.step_ms else None
        case "total":
            return run.total_s
        case "blocked":
            return max(run.blocking_stall_rate, default=None)
        case "waiting":
            shares = zip(run.blocking_stall_rate, run.other_idle_rate, strict=True)
            return max(map(sum, shares), default=None)
        case "on device":
            return max(run.peak_on_device, default=None)
        case _:
            raise ValueError(f"unknown value of a bar: {name!r}")
