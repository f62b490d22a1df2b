"""The events that the controller emits, and a change of plan."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxmorph.control.compute_watch import ComputeNotice
from jaxmorph.control.link_state import LinkHealth
from jaxmorph.control.orchestrator import Option, Situation
from jaxmorph.control.verdicts import Verdict, degraded_links
from jaxmorph.records import EventKind, Link, Routes
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.planner import Plan

_KINDS = {
    LinkHealth.SLOW: EventKind.STRAGGLER_DETECTED,
    LinkHealth.RECOVERING: EventKind.STRAGGLER_RECOVERING,
    LinkHealth.HEALTHY: EventKind.STRAGGLER_CLEARED,
}
_MOST_OPS = 2  # named in a decision's reason


@dataclass(frozen=True)
class ControlEvent:
    """An event of the controller; the recorder adds step and time (`records.Event`)."""

    kind: EventKind
    detail: str
    link: str | None = None
    evidence: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class PlanChange:
    """A decided change of plan.

    Attributes:
        routes: The new routes of the links whose route changes.
        evidence: See `evidence_of`.
    """

    plan: Plan
    reason: str
    routes: Routes
    evidence: Mapping[str, Any]


def verdict_events(
    changed: Iterable[Verdict], before: Mapping[tuple[int, int], Verdict]
) -> tuple[ControlEvent, ...]:
    """The events of changed verdicts; none for a new direction that is healthy.

    Args:
        before: All verdicts before the change.
    """
    degraded = {at for at, each in before.items() if each.health is not LinkHealth.HEALTHY}
    return tuple(
        ControlEvent(_KINDS[each.health], each.reason, str(each.link), each.to_json())
        for each in changed
        if each.health is not LinkHealth.HEALTHY or each.direction in degraded
    )


def describe_ops(changed: Mapping[tuple[int, OpKind], ComputeNotice]) -> tuple[str, ...]:
    """A sentence for each of the first changed ops, and one for the rest."""
    sentences = [
        f"stage {each.stage}'s {each.kind} takes {each.measured_ms:.1f} ms, not "
        f"{each.expected_ms:.1f}"
        for each in changed.values()
    ]
    more = len(sentences) - _MOST_OPS
    return (*sentences[:_MOST_OPS], *([f"and {more} ops more have changed"] if more > 0 else []))


def notice_event(notice: ComputeNotice) -> ControlEvent:
    """The event of ops that have become slower or faster."""
    return ControlEvent(EventKind.COMPUTE_CHANGED, notice.reason, evidence=asdict(notice))


def probe_event(link: Link, took_ms: Sequence[float], is_late: bool) -> ControlEvent:
    """The event of a probe of a direct link; `took_ms` is the median of each direction."""
    found = "is still slow" if is_late else "is as fast as it was"
    times = " and ".join(f"{each_ms:.1f}" for each_ms in took_ms)
    detail = f"the direct link {found}: {times} ms"
    evidence = {"took_ms": list(took_ms), "is_late": is_late}
    return ControlEvent(EventKind.LINK_PROBED, detail, str(link), evidence)


def evidence_of(situation: Situation, option: Option) -> dict[str, Any]:
    """The evidence of a decision: all plans with predicted steps, verdicts on degraded links."""
    degraded = degraded_links(situation.verdicts)
    return {
        "from": _in_brief(situation.in_force),
        "to": _in_brief(option),
        "candidates": [_in_brief(candidate) for candidate in situation.candidates],
        "undisturbed_ms": situation.undisturbed_ms,
        "verdicts": [each.to_json() for each in situation.verdicts if each.link in degraded],
    }


def _in_brief(option: Option) -> dict[str, Any]:
    schedule = option.plan.schedule
    return {
        "schedule": schedule.name,
        "warmup_forwards": schedule.warmup_forwards,
        "routes": {str(link): route for link, route in option.routes.items()},
        "predicted_ms": option.step_ms,
    }


def change_events(change: PlanChange) -> tuple[ControlEvent, ...]:
    """The events of a changed plan: one for the plan, and one for each link with another route."""
    routes = (
        ControlEvent(EventKind.ROUTE_CHANGED, f"{route}: {change.reason}", str(link))
        for link, route in change.routes.items()
    )
    return ControlEvent(EventKind.PLAN_CHANGED, change.reason, evidence=change.evidence), *routes


def describe_states(verdicts: Iterable[Verdict]) -> dict[str, str]:
    """The links that are not healthy, by their worse direction, for the terminal."""
    return {
        str(each.link): f"{each.health}, {each.latency_ms:.1f} ms "
        f"(healthy: {each.evidence.baseline_ms:.1f})"
        for each in sorted(verdicts, key=lambda each: (each.link, each.is_slow, each.latency_ms))
        if each.health is not LinkHealth.HEALTHY and not each.is_dead
    }
