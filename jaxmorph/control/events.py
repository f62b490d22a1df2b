"""A change of plan, and the events by which the controller reports what it finds and decides."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    """An event of the controller, as yet without step and time; see `records.Event`."""

    kind: EventKind
    detail: str
    link: str | None = None
    evidence: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class PlanChange:
    """A change of plan that has been decided.

    Attributes:
        routes: The new routes of the links whose route changes.
        evidence: What was weighed.
    """

    plan: Plan
    reason: str
    routes: Routes
    evidence: Mapping[str, Any]


def verdict_event(
    verdict: Verdict, before: Mapping[tuple[int, int], Verdict]
) -> ControlEvent | None:
    """The event of a verdict that has changed; None where a link is first seen, and healthy.

    Args:
        before: All verdicts as they were, by source and destination.
    """
    last = before.get((verdict.source, verdict.destination))
    was = LinkHealth.HEALTHY if last is None else last.health
    if verdict.health is LinkHealth.HEALTHY and was is LinkHealth.HEALTHY:
        return None
    kind = _KINDS[verdict.health]
    return ControlEvent(kind, verdict.reason, str(verdict.link), verdict.to_json())


def describe_ops(changed: Mapping[tuple[int, OpKind], ComputeNotice]) -> tuple[str, ...]:
    """Which ops cost what they didn't, a sentence each; of many the first."""
    told = [
        f"stage {each.stage}'s {each.kind} takes {each.measured_ms:.1f} ms, not "
        f"{each.expected_ms:.1f}"
        for each in changed.values()
    ]
    more = len(told) - _MOST_OPS
    return (*told[:_MOST_OPS], *([f"and {more} ops more have changed"] if more > 0 else []))


def notice_event(notice: ComputeNotice) -> ControlEvent:
    """Ops have become slower, or faster."""
    return ControlEvent(EventKind.COMPUTE_CHANGED, notice.reason, evidence=notice.to_json())


def probe_event(link: Link, took_ms: Sequence[float], is_late: bool) -> ControlEvent:
    """A probe of a direct link has come back: a message's median time in each direction."""
    found = "is still slow" if is_late else "is as fast as it was"
    times = " and ".join(f"{each_ms:.1f}" for each_ms in took_ms)
    detail = f"the direct link {found}: {times} ms"
    evidence = {"took_ms": list(took_ms), "is_late": is_late}
    return ControlEvent(EventKind.LINK_PROBED, detail, str(link), evidence)


def evidence_of(situation: Situation, option: Option) -> dict[str, Any]:
    """What was weighed: plans with their predicted steps, and the verdicts on degraded links."""
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
    """A plan is in force: one event, and one for each link with another route."""
    routes = (
        ControlEvent(EventKind.ROUTE_CHANGED, f"{route}: {change.reason}", str(link))
        for link, route in change.routes.items()
    )
    return ControlEvent(EventKind.PLAN_CHANGED, change.reason, evidence=change.evidence), *routes


def describe_states(verdicts: Iterable[Verdict]) -> dict[str, str]:
    """The links that are not healthy, each in a few words."""
    return {
        str(each.link): f"{each.health}, {each.latency_ms:.1f} ms "
        f"(healthy: {each.evidence.baseline_ms:.1f})"
        for each in verdicts
        if each.health is not LinkHealth.HEALTHY and not each.is_dead
    }
