"""A morph on its way to all ranks, and what rank 0 says while it adapts: events, as yet undated."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmorph.control.compute_watch import ComputeNotice
from jaxmorph.control.link_state import LinkHealth
from jaxmorph.control.orchestrator import Option, Situation
from jaxmorph.control.verdicts import Verdict, degraded_links
from jaxmorph.program.instructions import Channel, Payload, RankProgram, parse_program
from jaxmorph.records import EventKind, Link, Message, Route
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.planner import Plan

Happening = dict[str, Any]
"""An event's `kind`, `link`, `detail` and `evidence`."""

DETECTED = "straggler_detected"
RECOVERING = "straggler_recovering"
_KINDS = {
    LinkHealth.SLOW: DETECTED,
    LinkHealth.RECOVERING: RECOVERING,
    LinkHealth.HEALTHY: "straggler_cleared",
}
_MOST_OPS = 2  # named in a decision's reason


@dataclass(frozen=True)
class Morph:
    """A change of plan, decided and made ready.

    Attributes:
        programs: Every rank's instructions, as `program_text` writes them: what a rank needs is
            made once, where time doesn't matter, and not by every rank between two steps.
        slots: How many slots each delegated channel needs.
        routes: The new routes of the links whose route changes.
    """

    plan: Plan
    programs: tuple[str, ...]
    slots: Mapping[Channel, int]
    reason: str
    routes: Mapping[Link, Route]
    evidence: Message

    def to_json(self) -> Message:
        """What the ranks are told of it."""
        return {
            "programs": self.programs,
            "slots": [[*channel, number] for channel, number in self.slots.items()],
        }


def own_part(told: Message, rank: int) -> tuple[RankProgram, dict[Channel, int]]:
    """A rank's instructions, and the slots that channels need, of what `Morph.to_json` told."""
    return parse_program(told["programs"][rank]), slots_from_json(told["slots"])


def slots_from_json(told: list[list[Any]]) -> dict[Channel, int]:
    """Slots by channel, from lists of a channel's fields and its number."""
    return {
        Channel(Payload(payload), source, destination, index): number
        for payload, source, destination, index, number in told
    }


def of_verdict(verdict: Verdict, before: Mapping[tuple[int, int], Verdict]) -> Happening | None:
    """What a verdict that has changed says; None where a link is first seen, and healthy.

    Args:
        before: All verdicts as they were, by source and destination.
    """
    last = before.get((verdict.source, verdict.destination))
    was = LinkHealth.HEALTHY if last is None else last.health
    if verdict.health is LinkHealth.HEALTHY and was is LinkHealth.HEALTHY:
        return None
    return {
        "kind": _KINDS[verdict.health],
        "link": str(verdict.link),
        "detail": verdict.reason,
        "evidence": verdict.to_json(),
    }


def ops_in_words(changed: Mapping[tuple[int, OpKind], ComputeNotice]) -> tuple[str, ...]:
    """Which ops cost what they didn't, a sentence each; of many the first."""
    told = [
        f"stage {each.stage}'s {each.kind} takes {each.measured_ms:.1f} ms, not "
        f"{each.expected_ms:.1f}"
        for each in changed.values()
    ]
    more = len(told) - _MOST_OPS
    return (*told[:_MOST_OPS], *([f"and {more} ops more have changed"] if more > 0 else []))


def of_notice(notice: ComputeNotice) -> Happening:
    """That ops have become slower, or faster."""
    return {"kind": "compute_changed", "detail": notice.reason, "evidence": notice.to_json()}


def of_probe(link: Link, took_ms: Sequence[float], is_late: bool) -> Happening:
    """What a probe of a direct link has found: a message's median time each way."""
    found = "is still slow" if is_late else "is as fast as it was"
    times = " and ".join(f"{each_ms:.1f}" for each_ms in took_ms)
    return {
        "kind": "link_probed",
        "link": str(link),
        "detail": f"the direct link {found}: {times} ms",
        "evidence": {"took_ms": list(took_ms), "is_late": is_late},
    }


def evidence_of(situation: Situation, option: Option) -> Happening:
    """What was weighed: plans with their predicted steps, and the verdicts on degraded links."""
    degraded = degraded_links(situation.verdicts)
    return {
        "from": _in_brief(situation.in_force),
        "to": _in_brief(option),
        "candidates": [_in_brief(candidate) for candidate in situation.candidates],
        "undisturbed_ms": situation.undisturbed_ms,
        "verdicts": [each.to_json() for each in situation.verdicts if each.link in degraded],
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
        {"kind": EventKind.PLAN_CHANGED, "detail": morph.reason, "evidence": morph.evidence},
        *routes,
    ]


def states_in_words(verdicts: Iterable[Verdict]) -> dict[str, str]:
    """The links that are not healthy, each in a few words."""
    return {
        str(each.link): f"{each.health}, {each.latency_ms:.1f} ms "
        f"(healthy: {each.evidence.baseline_ms:.1f})"
        for each in verdicts
        if each.health is not LinkHealth.HEALTHY and not each.is_dead
    }
