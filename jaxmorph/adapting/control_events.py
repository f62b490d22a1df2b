"""What rank 0 says of links, ops and plans while it adapts: events, without their time and step."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxmorph.adapting.morph import Morph
from jaxmorph.control.compute_watch import ComputeNotice
from jaxmorph.control.conditions import ailing_links, link_of
from jaxmorph.control.orchestrator import Option, Situation
from jaxmorph.control.verdicts import LinkHealth, Verdict
from jaxmorph.reporting.records import PLAN_CHANGED
from jaxmorph.schedule.costs import Link
from jaxmorph.schedule.ops import OpKind

Happening = dict[str, Any]
"""An event's `kind`, `link`, `detail` and `evidence`."""

DETECTED = "straggler_detected"
RECOVERING = "straggler_recovering"
_KINDS = {
    LinkHealth.SLOW: DETECTED,
    LinkHealth.DEAD: DETECTED,
    LinkHealth.RECOVERING: RECOVERING,
    LinkHealth.HEALTHY: "straggler_cleared",
}
_MOST_OPS = 2  # named in a decision's reason


def of_verdict(verdict: Verdict, before: Mapping[tuple[int, int], Verdict]) -> Happening | None:
    """What a verdict that has changed says.

    Args:
        before: All verdicts as they were, by source and destination.

    Returns:
        The event; None where a link is seen for the first time, and healthy.
    """
    last = before.get((verdict.source, verdict.destination))
    was = LinkHealth.HEALTHY if last is None else last.health
    if verdict.health is LinkHealth.HEALTHY and was is LinkHealth.HEALTHY:
        return None
    return {
        "kind": _KINDS[verdict.health],
        "link": str(link_of(verdict)),
        "detail": verdict.reason,
        "evidence": verdict.to_json(),
    }


def ops_in_words(changed: Mapping[tuple[int, OpKind], ComputeNotice]) -> tuple[str, ...]:
    """Which ops cost what they didn't, a sentence each; of many the first.

    Args:
        changed: The last notice of each stage and kind of op.
    """
    told = [
        f"stage {each.stage}'s {each.kind} takes {each.measured_ms:.1f} ms, not "
        f"{each.expected_ms:.1f}"
        for each in changed.values()
    ]
    more = len(told) - _MOST_OPS
    return (*told[:_MOST_OPS], *([f"and {more} ops more have changed"] if more > 0 else []))


def of_notice(notice: ComputeNotice) -> Happening:
    """What a notice says.

    Args:
        notice: Of ops that have become slower, or faster.
    """
    return {"kind": "compute_changed", "detail": notice.reason, "evidence": notice.to_json()}


def of_probe(link: Link, took_ms: Sequence[float], is_late: bool) -> Happening:
    """What a probe has found.

    Args:
        link: The direct link that was probed.
        took_ms: What a message took each way, the median of a few.
        is_late: Whether that is more than a healthy link takes.
    """
    found = "is still slow" if is_late else "is as fast as it was"
    times = " and ".join(f"{each_ms:.1f}" for each_ms in took_ms)
    return {
        "kind": "link_probed",
        "link": str(link),
        "detail": f"the direct link {found}: {times} ms",
        "evidence": {"took_ms": list(took_ms), "is_late": is_late},
    }


def evidence_of(situation: Situation, option: Option) -> Happening:
    """What was weighed: plans with their predicted steps, and the verdicts on ailing links.

    Args:
        situation: In which it was decided.
    """
    ailing = ailing_links(situation.verdicts)
    return {
        "from": _in_brief(situation.in_force),
        "to": _in_brief(option),
        "candidates": [_in_brief(candidate) for candidate in situation.candidates],
        "undisturbed_ms": situation.undisturbed_ms,
        "verdicts": [each.to_json() for each in situation.verdicts if link_of(each) in ailing],
    }


def _in_brief(option: Option) -> Happening:
    schedule = option.plan.schedule
    return {
        "schedule": schedule.name,
        "warmup_forwards": schedule.warmup_forwards,
        "routes": {str(link): route for link, route in option.routes.items()},
        "predicted_ms": option.step_ms,
    }


def of_morph(morph: Morph) -> list[Happening]:
    """What a morph that is in force says: of the plan, and of each link with another route."""
    routes = [
        {"kind": "route_changed", "link": str(link), "detail": f"{route}: {morph.reason}"}
        for link, route in morph.routes.items()
    ]
    return [
        {"kind": PLAN_CHANGED, "detail": morph.reason, "evidence": morph.evidence},
        *routes,
    ]


def states_in_words(verdicts: Iterable[Verdict]) -> dict[str, str]:
    """The links that are not healthy, each in a few words."""
    return {
        str(link_of(each)): f"{each.health}, {each.latency_ms:.1f} ms "
        f"(healthy: {each.evidence.baseline_ms:.1f})"
        for each in verdicts
        if each.health not in (LinkHealth.HEALTHY, LinkHealth.DEAD)
    }
