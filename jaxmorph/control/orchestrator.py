"""Decides between two steps whether to keep the plan in force or to morph, and why."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from jaxmorph.control.link_state import LinkHealth, delegated_links
from jaxmorph.control.verdicts import Verdict, dead_links, degraded_links
from jaxmorph.records import Link, Route
from jaxmorph.schedule.planner import Plan

Subject: TypeAlias = Link | None
"""What a morph changes: the route of a link, or the schedule."""
SCHEDULE: Subject = None

_SOON = 4  # stays: a change within so many is flapping; twice as many without one are calm


class Stay(NamedTuple):
    """The step of a subject's last change, its stay in steps, and the first step it may change."""

    since_step: float
    steps: int
    until_step: int


@dataclass(frozen=True)
class Dwell:
    """How long a morph's changes must stay: the route of each link, and the schedule.

    A subject's first stay is `least_steps`. If it changes again within four stays, the next stay is
    twice as long, up to `most_steps`. After eight stays without a change it is halved.

    Attributes:
        morphed_step: The first step of the plan in force; None: the run began with it.
    """

    least_steps: int
    most_steps: int
    stays: Mapping[Subject, Stay] = field(default_factory=dict)
    morphed_step: int | None = None

    def waits(self, subjects: Iterable[Subject], step: int) -> int:
        """The steps from `step` on until all these subjects may change."""
        ends = (self.stays[each].until_step for each in subjects if each in self.stays)
        return max(0, max(ends, default=step) - step)

    def rests(self, step: int) -> int:
        """The steps from `step` on until the plan in force is `least_steps` old."""
        if self.morphed_step is None:
            return 0
        return max(0, self.morphed_step + self.least_steps - step)

    def after(self, subjects: Iterable[Subject], step: int) -> "Dwell":
        """The stays after a morph that is in force from `step` on."""
        steps = {subject: self._steps(subject, step) for subject in subjects}
        changed = {each: Stay(step, steps[each], step + steps[each]) for each in steps}
        return replace(self, stays={**self.stays, **changed})

    def extended(self, subject: Subject, step: int) -> "Dwell":
        """The stays after a subject changed as part of another change, which is no flapping.

        It stays for at least the shortest stay; the length of its own stay is unchanged.
        """
        last = self.stays.get(subject, Stay(-math.inf, self.least_steps, step))
        until_step = max(last.until_step, step + self.least_steps)
        stay = last._replace(until_step=until_step)
        return replace(self, stays={**self.stays, subject: stay})

    def for_slow(self, slow_since: Iterable[int]) -> "Dwell":
        """The stays; the schedule's is the shortest if a link has turned slow during it."""
        last = self.stays.get(SCHEDULE)
        if last is None or math.isinf(last.since_step):  # it has changed only together with routes
            return self
        if not any(last.since_step <= step for step in slow_since):
            return self
        until_step = min(last.until_step, int(last.since_step) + self.least_steps)
        return replace(self, stays={**self.stays, SCHEDULE: last._replace(until_step=until_step)})

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
    """A plan, and its predicted step under the current conditions."""

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
        in_force_ms: The predicted step of the plan in force under the current conditions.
        undisturbed_ms: The same if all links were healthy.
    """

    in_force_ms: float
    undisturbed_ms: float
    candidates: tuple[Option, ...]


@dataclass(frozen=True)
class Situation:
    """The inputs of a decision.

    Attributes:
        step: The first step in which a new plan could be in force.
        candidates: The home plan (the run's plan for healthy links), then others, from the least
            to the most different.
        undisturbed_ms: See `Options`.
        worth: The least gain of a morph, as a share of the step.
        may_delegate_healthy: Whether healthy links may be delegated too.
        other_changes: What else has changed, a sentence each.
    """

    step: int
    verdicts: tuple[Verdict, ...]
    in_force: Option
    candidates: tuple[Option, ...]
    undisturbed_ms: float
    dwell: Dwell
    worth: float
    may_delegate_healthy: bool = False
    other_changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The plan to run next.

    Attributes:
        chosen: The index of the candidate; None: the plan in force stays.
        wait_steps: The steps until the next decision, if a better candidate must wait; else 0.
    """

    chosen: int | None
    reason: str
    wait_steps: int = 0


def decide(situation: Situation) -> Decision:
    """Decide whether to morph, and why.

    - Only degraded links are delegated, unless the situation allows others: no prediction counts
      the host memory and processors that delegation takes. Each link goes back independently.
    - While a link is degraded, a morph must shorten the step by `worth`. Once all are healthy, the
      home plan comes back unless it makes the step longer by `worth`.
    - A link goes back only after its dwell, which delays no other link's change. A slow link is
      delegated without a dwell, but no morph comes before the last one is `least_steps` old.
    - A link without a direct path is delegated at once, whatever the gain.

    Source: PipeMorph, sections 4.3 and 6. There all links are delegated together.
    """
    now = situation.in_force
    why = "; ".join([_links_in_words(situation.verdicts), *situation.other_changes])
    best = _shortest(situation)
    if best is None or not _is_worth_it(best, situation):
        kept = f"{_kept_in_words(situation)}{_other_in_words(best, situation)}"
        return Decision(None, f"{why}: {kept}")
    chosen, later = best, 0
    if staying := _staying_delegated(situation, situation.candidates[best]):
        at_once = _shortest(situation, staying)
        if at_once is not None and _is_worth_it(at_once, situation, staying):
            chosen, later = at_once, max(1, _wait_steps(situation, best))
    then = situation.candidates[chosen]
    predicted = f"predicted step {now.step_ms:.0f} -> {then.step_ms:.0f} ms"
    must_change = is_forced(situation)
    if not must_change and (wait := _wait_steps(situation, chosen)):
        return Decision(None, f"{why}: waits for {wait} steps, then {predicted}", wait)
    if must_change:
        predicted = f"{predicted}; without a direct path there is no choice"
    return Decision(chosen, f"{why}: {', '.join(_changes(now, then))}; {predicted}", later)


def changed_routes(now: Mapping[Link, Route], then: Mapping[Link, Route]) -> dict[Link, Route]:
    """The new routes of the links whose route changes; a link that is not named is direct."""
    changed: dict[Link, Route] = {}
    for link in {**now, **then}:
        new = then.get(link, "direct")
        if new != now.get(link, "direct"):
            changed[link] = new
    return changed


def dwell_after(dwell: Dwell, now: Option, then: Option, step: int) -> Dwell:
    """The stays after a morph: of newly delegated links, or of the schedule if it changed alone."""
    routes = changed_routes(now.routes, then.routes)
    if not routes:
        return dwell.after([SCHEDULE], step)
    newly = [link for link, new in routes.items() if new == "delegated"]
    return dwell.after(newly, step).extended(SCHEDULE, step)


def dwelling_links(dwell: Dwell, routes: Mapping[Link, Route], step: int) -> frozenset[Link]:
    """The delegated links that may not go back yet, healthy or not."""
    return frozenset(link for link in delegated_links(routes) if dwell.waits([link], step))


def is_forced(situation: Situation) -> bool:
    """Whether the plan in force sends on a direct path that has failed."""
    return not dead_links(situation.verdicts) <= delegated_links(situation.in_force.routes)


def _wait_steps(situation: Situation, candidate: int) -> int:
    """The steps until the first dwell ends that a candidate waits for; 0: it need not wait.

    It waits for the dwell of the links that go back, or of the schedule if it changes alone. If a
    link has turned slow since the schedule last changed, that wait is the shortest dwell only.
    No morph follows another sooner than `least_steps`.
    """
    now, then = situation.in_force, situation.candidates[candidate]
    dwell, routes = situation.dwell, changed_routes(now.routes, then.routes)
    if not routes:
        dwell = dwell.for_slow(each.step for each in situation.verdicts if each.is_slow)
    subjects = _newly_delegated(now, then) if routes else {SCHEDULE}
    waits = (dwell.waits([subject], situation.step) for subject in subjects)
    return max(dwell.rests(situation.step), min(filter(None, waits), default=0))


def _staying_delegated(situation: Situation, then: Option) -> frozenset[Link]:
    """The links that must stay delegated for now, if a plan would take one of them back."""
    now = situation.in_force
    back = _newly_delegated(now, then)
    # Links that go back are probed first. The delegation of a slow link must not wait for that.
    if back and _newly_delegated(then, now) & degraded_links(situation.verdicts):
        return delegated_links(now.routes)
    dwelling = dwelling_links(situation.dwell, now.routes, situation.step)
    return dwelling if back & dwelling else frozenset()


def _is_allowed(
    option: Option, situation: Situation, staying: frozenset[Link] = frozenset()
) -> bool:
    """Whether a plan delegates all links that it must, and none that it must not."""
    if not staying | dead_links(situation.verdicts) <= delegated_links(option.routes):
        return False
    if situation.may_delegate_healthy:
        return True
    # A link that recovers may stay delegated, but gives no reason to delegate it.
    slow = {each.link for each in situation.verdicts if each.health is LinkHealth.SLOW}
    recovering = degraded_links(situation.verdicts) & delegated_links(situation.in_force.routes)
    return _newly_delegated(option, situation.candidates[0]) <= slow | recovering | staying


def _newly_delegated(option: Option, than: Option) -> frozenset[Link]:
    return delegated_links(option.routes) - delegated_links(than.routes)


def _shortest(situation: Situation, staying: frozenset[Link] = frozenset()) -> int | None:
    """The first allowed candidate that is nearly the shortest: within half of `worth`.

    Earlier candidates change less.
    """
    steps_ms = {
        index: option.step_ms
        for index, option in enumerate(situation.candidates)
        if _is_allowed(option, situation, staying)
    }
    if not steps_ms:
        return None
    good_enough_ms = min(steps_ms.values()) * (1 + situation.worth / 2)
    return next(index for index, step_ms in steps_ms.items() if step_ms <= good_enough_ms)


def _is_worth_it(
    candidate: int, situation: Situation, staying: frozenset[Link] = frozenset()
) -> bool:
    """Whether a candidate is another plan, and gains enough or replaces one that can't stay."""
    now, then = situation.in_force, situation.candidates[candidate]
    if _is_same(then, now):
        return False
    gain = 1 - then.step_ms / now.step_ms if now.step_ms else 0.0
    goes_home = not degraded_links(situation.verdicts) and candidate == 0
    least_gain = -situation.worth if goes_home else situation.worth
    return gain >= least_gain or not _is_allowed(now, situation, staying)


def _is_same(one: Option, other: Option) -> bool:
    same_order = one.plan.schedule == other.plan.schedule
    return same_order and not changed_routes(one.routes, other.routes)


def _kept_in_words(situation: Situation) -> str:
    now_ms, healthy_ms = situation.in_force.step_ms, situation.undisturbed_ms
    if not degraded_links(situation.verdicts):
        return f"the plan in force stays, predicted step {now_ms:.0f} ms"
    if now_ms <= healthy_ms * (1 + situation.worth):
        return f"the plan in force absorbs it, predicted step {now_ms:.0f} ms"
    return f"the plan in force stays, predicted step {now_ms:.0f} ms ({healthy_ms:.0f} healthy)"


def _other_in_words(best: int | None, situation: Situation) -> str:
    """The step of the best other plan, if there is one."""
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
    both = [each for each in verdicts if each.link == link]
    degraded = [each for each in both if each.health is not LinkHealth.HEALTHY]
    if any(each.is_dead for each in degraded):
        return f"link {link} has no direct path"
    named = {f"{each.source}>{each.destination}": each for each in degraded}
    if len(degraded) == len(both) > 1 and _are_near(*(each.latency_ms for each in degraded)):
        named = {"each way": degraded[0]}
    times = " and ".join(
        f"{each.latency_ms:.1f} ms {name} (healthy: {each.evidence.baseline_ms:.1f})"
        for name, each in named.items()
    )
    recovers = all(each.health is LinkHealth.RECOVERING for each in degraded)
    return f"link {link} takes {times}{', recovering' if recovers else ''}"


def _are_near(*latencies_ms: float) -> bool:
    return max(latencies_ms) - min(latencies_ms) <= max(1.0, 0.1 * max(latencies_ms))


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
