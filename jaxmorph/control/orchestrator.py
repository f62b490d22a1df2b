"""Decides between two steps whether to go on with the plan in force or to morph, and says why."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from jaxmorph.control.link_state import LinkHealth
from jaxmorph.control.verdicts import Verdict, dead_links, degraded_links
from jaxmorph.records import Link, Route
from jaxmorph.schedule.planner import Plan

Subject: TypeAlias = Link | None
"""What a morph changes: the route of a link, or the schedule."""
SCHEDULE: Subject = None

_SOON = 4  # stays: what changes again within so many flaps; after twice as many it has been calm


class Stay(NamedTuple):
    """Since when something is as it is, its stay in steps, and the first step it may change in."""

    since_step: float
    steps: int
    until_step: int


@dataclass(frozen=True)
class Dwell:
    """How long what morphs have changed is let stand: each link's route, and the schedule.

    A subject's first stay is `least_steps`. If it changes again within four of its stays, the next
    one is twice as long, up to `most_steps`; after a calm of eight stays it is half as long again.
    """

    least_steps: int
    most_steps: int
    stays: Mapping[Subject, Stay] = field(default_factory=dict)

    def waits(self, subjects: Iterable[Subject], step: int) -> int:
        """How many steps to wait, from one on, until all of some subjects may change."""
        ends = (self.stays[each].until_step for each in subjects if each in self.stays)
        return max(0, max(ends, default=step) - step)

    def after(self, subjects: Iterable[Subject], step: int) -> "Dwell":
        """The stays after a morph that first holds in a step."""
        steps = {subject: self._steps(subject, step) for subject in subjects}
        changed = {each: Stay(step, steps[each], step + steps[each]) for each in steps}
        return replace(self, stays={**self.stays, **changed})

    def standing(self, subjects: Iterable[Subject], step: int) -> "Dwell":
        """The stays after a morph that had some subjects change for another one's sake.

        They stand for the shortest stay with it, and flap neither more nor less.
        """
        never = Stay(-math.inf, self.least_steps, step)
        stood: dict[Subject, Stay] = {}
        for subject in subjects:
            last = self.stays.get(subject, never)
            until_step = max(last.until_step, step + self.least_steps)
            stood[subject] = last._replace(until_step=until_step)
        return replace(self, stays={**self.stays, **stood})

    def _steps(self, subject: Subject, step: int) -> int:
        last = self.stays.get(subject)
        if last is None:
            return self.least_steps
        calm_steps = step - last.since_step
        if calm_steps <= _SOON * last.steps:
            return min(2 * last.steps, self.most_steps)
        if calm_steps > 2 * _SOON * last.steps:
            return max(last.steps // 2, self.least_steps)
        return last.steps


@dataclass(frozen=True)
class Option:
    """A plan, with the step that is predicted for the conditions now."""

    plan: Plan
    step_ms: float

    @property
    def routes(self) -> Mapping[Link, Route]:
        """Each link's route."""
        return self.plan.routes


@dataclass(frozen=True)
class Options:
    """The plans to choose from.

    Attributes:
        in_force_ms: The predicted step of the plan in force under the conditions now.
        undisturbed_ms: The same if all links were healthy.
    """

    in_force_ms: float
    undisturbed_ms: float
    candidates: tuple[Option, ...]


@dataclass(frozen=True)
class Situation:
    """All that a decision rests on.

    Attributes:
        step: The first step that a new plan could hold in.
        candidates: The run's plan for healthy links, and others made for the conditions now, those
            that differ least from it first.
        undisturbed_ms: What the plan in force would take if all links were healthy.
        dwell: How long earlier morphs are to stand.
        worth: The least gain for which to morph, as a share of the step.
        may_delegate_healthy: Whether links that don't ail may be delegated, where that is worth it.
        news: What else has changed, a sentence each.
    """

    step: int
    verdicts: tuple[Verdict, ...]
    in_force: Option
    candidates: tuple[Option, ...]
    undisturbed_ms: float
    dwell: Dwell
    worth: float
    may_delegate_healthy: bool = False
    news: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What is to run next.

    Attributes:
        chosen: Which of the candidates; None: the plan in force stays.
        wait_steps: How many steps to wait before asking again, where only that was against what
            would be better still.
    """

    chosen: int | None
    reason: str
    wait_steps: int = 0


def decide(situation: Situation) -> Decision:
    """Go on, or morph, and why.

    A link is delegated only while it ails, unless the situation allows for more, and goes back by
    itself, whatever the others do: delegation takes host memory and processors that no prediction
    counts. While links ail a morph must shorten the step by what it is worth; once all are healthy
    the first plan comes back unless it costs that much. What takes a slow link off the queues never
    waits; what takes it back waits for its dwell, and no other link's change waits with it. A link
    without a direct path is delegated whatever that gains, and nothing holds it back.

    Source: PipeMorph, sections 4.3 and 6. There all links are delegated together.
    """
    now = situation.in_force
    why = "; ".join([_links_in_words(situation.verdicts), *situation.news])
    best = _shortest(situation)
    if best is None or not _is_worth_it(best, situation):
        return Decision(None, f"{why}: {_standing(situation)}{_other_in_words(best, situation)}")
    chosen, later = best, 0
    if held := _held(situation, situation.candidates[best]):
        at_once = _shortest(situation, held)
        if at_once is not None and _is_worth_it(at_once, situation, held):
            chosen, later = at_once, max(1, _wait_steps(situation, best))
    then = situation.candidates[chosen]
    predicted = f"predicted step {now.step_ms:.0f} -> {then.step_ms:.0f} ms"
    is_forced = _is_forced(situation)
    if not is_forced and (wait := _wait_steps(situation, chosen)):
        return Decision(None, f"{why}: waits for {wait} steps, then {predicted}", wait)
    if is_forced:
        predicted = f"{predicted}; without a direct path there is no choice"
    return Decision(chosen, f"{why}: {_change_in_words(now, then)}; {predicted}", later)


def changed_routes(now: Mapping[Link, Route], then: Mapping[Link, Route]) -> dict[Link, Route]:
    """The new routes of the links whose route changes; a link that is not named is direct."""
    changed: dict[Link, Route] = {}
    for link in {**now, **then}:
        new = then.get(link, "direct")
        if new != now.get(link, "direct"):
            changed[link] = new
    return changed


def dwell_after(dwell: Dwell, now: Option, then: Option, step: int) -> Dwell:
    """How long things are to stand after a morph.

    A link that is delegated anew stands as one that flaps, or not, for itself. So does the schedule
    where a morph changes nothing else; that it changed with a link's route is no flapping of its.
    """
    routes = changed_routes(now.routes, then.routes)
    if not routes:
        return dwell.after([SCHEDULE], step)
    anew = [link for link, new in routes.items() if new == "delegated"]
    return dwell.after(anew, step).standing([SCHEDULE], step)


def dwelling_links(dwell: Dwell, routes: Mapping[Link, Route], step: int) -> frozenset[Link]:
    """The delegated links that are not to go back yet, be they healthy or not."""
    delegated = (link for link, route in routes.items() if route == "delegated")
    return frozenset(link for link in delegated if dwell.waits([link], step))


def _is_forced(situation: Situation) -> bool:
    """Whether the plan in force has a link on a direct path that it doesn't have."""
    return not dead_links(situation.verdicts) <= _delegated(situation.in_force)


def _wait_steps(situation: Situation, candidate: int) -> int:
    """How long until something may change that keeps a candidate waiting; 0: it may come now.

    Links that go back have to have stood for their time, or the schedule if it is alone.
    """
    now, then = situation.in_force, situation.candidates[candidate]
    routes = changed_routes(now.routes, then.routes)
    subjects = _delegated_anew(now, then) if routes else {SCHEDULE}
    waits = (situation.dwell.waits([subject], situation.step) for subject in subjects)
    return min(filter(None, waits), default=0)


def _held(situation: Situation, then: Option) -> frozenset[Link]:
    """The delegated links that a plan would take back, and that have to stay for now.

    Those that dwell; and all of them where it takes a slow link off the queues: that would have to
    wait until they are probed.
    """
    now = situation.in_force
    back = _delegated_anew(now, then)
    if back and _delegated_anew(then, now) & degraded_links(situation.verdicts):
        return _delegated(now)
    dwelling = dwelling_links(situation.dwell, now.routes, situation.step)
    return dwelling if back & dwelling else frozenset()


def _is_allowed(option: Option, situation: Situation, held: frozenset[Link] = frozenset()) -> bool:
    """Whether a plan takes no links off their routes but those that are degraded, or have to stay.

    And leaves none direct that has to be delegated.
    """
    if not held | dead_links(situation.verdicts) <= _delegated(option):
        return False
    if situation.may_delegate_healthy:
        return True
    degraded = degraded_links(situation.verdicts)
    return _delegated_anew(option, situation.candidates[0]) <= degraded | held


def _delegated(option: Option) -> frozenset[Link]:
    return frozenset(link for link, route in option.routes.items() if route == "delegated")


def _delegated_anew(option: Option, than: Option) -> frozenset[Link]:
    return _delegated(option) - _delegated(than)


def _shortest(situation: Situation, held: frozenset[Link] = frozenset()) -> int | None:
    """The first allowed candidate than which none is shorter by half of what a morph must gain."""
    steps_ms = {
        index: option.step_ms
        for index, option in enumerate(situation.candidates)
        if _is_allowed(option, situation, held)
    }
    if not steps_ms:
        return None
    good_enough_ms = min(steps_ms.values()) * (1 + situation.worth / 2)
    return next(index for index, step_ms in steps_ms.items() if step_ms <= good_enough_ms)


def _is_worth_it(candidate: int, situation: Situation, held: frozenset[Link] = frozenset()) -> bool:
    """Whether a candidate is another plan, and gains enough, or the one in force can't stay."""
    now, then = situation.in_force, situation.candidates[candidate]
    if _is_same(then, now):
        return False
    gain = 1 - then.step_ms / now.step_ms if now.step_ms else 0.0
    back = not degraded_links(situation.verdicts) and candidate == 0  # to the first plan: easy
    least_gain = -situation.worth if back else situation.worth
    return gain >= least_gain or not _is_allowed(now, situation, held)


def _is_same(one: Option, other: Option) -> bool:
    same_order = one.plan.schedule == other.plan.schedule
    return same_order and not changed_routes(one.routes, other.routes)


def _standing(situation: Situation) -> str:
    """How the plan in force takes it."""
    now_ms, healthy_ms = situation.in_force.step_ms, situation.undisturbed_ms
    if not degraded_links(situation.verdicts):
        return f"the plan in force stays, predicted step {now_ms:.0f} ms"
    if now_ms <= healthy_ms * (1 + situation.worth):
        return f"the plan in force absorbs it, predicted step {now_ms:.0f} ms"
    return f"the plan in force stays, predicted step {now_ms:.0f} ms ({healthy_ms:.0f} healthy)"


def _other_in_words(best: int | None, situation: Situation) -> str:
    """What another plan would have brought, if there is one."""
    if best is None or _is_same(situation.candidates[best], situation.in_force):
        return ""
    return f", with another plan {situation.candidates[best].step_ms:.0f}"


def _links_in_words(verdicts: tuple[Verdict, ...]) -> str:
    degraded = sorted(degraded_links(verdicts))
    if not degraded:
        return "all links are healthy"
    return ", ".join(_link_in_words(link, verdicts) for link in degraded)


def _link_in_words(link: Link, verdicts: tuple[Verdict, ...]) -> str:
    """Such as `link 6-7 takes 31.2 ms each way (healthy: 1.1)`."""
    ways = [each for each in verdicts if each.link == link]
    ill = [each for each in ways if each.health is not LinkHealth.HEALTHY]
    if any(each.is_dead for each in ill):
        return f"link {link} has no direct path"
    times = {f"{each.source}>{each.destination}": each for each in ill}
    if len(ill) == len(ways) > 1 and _are_near(*(each.latency_ms for each in ill)):
        times = {"each way": ill[0]}
    told = " and ".join(
        f"{each.latency_ms:.1f} ms {way} (healthy: {each.evidence.baseline_ms:.1f})"
        for way, each in times.items()
    )
    recovers = all(each.health is LinkHealth.RECOVERING for each in ill)
    return f"link {link} takes {told}{', recovering' if recovers else ''}"


def _are_near(*latencies_ms: float) -> bool:
    return max(latencies_ms) - min(latencies_ms) <= max(1.0, 0.1 * max(latencies_ms))


def _change_in_words(now: Option, then: Option) -> str:
    return ", ".join(_changes(now, then))


def _changes(now: Option, then: Option) -> Iterator[str]:
    for link, route in sorted(changed_routes(now.routes, then.routes).items()):
        yield f"{link} {'delegated' if route == 'delegated' else 'direct again'}"
    old, new = now.plan.schedule, then.plan.schedule
    if old.name != new.name:
        yield f"schedule {old.name} -> {new.name}"
    if old.warmup_forwards != new.warmup_forwards:
        yield f"warm-ups {_numbers(old.warmup_forwards)} -> {_numbers(new.warmup_forwards)}"
    elif old.name == new.name:
        yield "the same order" if old == new else "another order of the same warm-ups"


def _numbers(values: tuple[int, ...]) -> str:
    return " ".join(map(str, values))
