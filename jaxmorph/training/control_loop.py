"""Rank 0's side of adapting: from a step's timings to verdicts, a decision, and a morph made ready.

Detection is done where a step's books are kept; planning and deciding on a thread that mostly waits
for the planning process. Neither holds up a step.
"""

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

from jaxmorph.config.sections import Adaptation
from jaxmorph.control.compute_watch import ComputeNotice, ComputeWatch, followed
from jaxmorph.control.conditions import UsualLinks, links_under
from jaxmorph.control.detector import Detector
from jaxmorph.control.events import (
    DETECTED,
    RECOVERING,
    Happening,
    Morph,
    evidence_of,
    of_morph,
    of_notice,
    of_verdict,
    ops_in_words,
    states_in_words,
)
from jaxmorph.control.link_state import FailedPaths
from jaxmorph.control.measurements import LinkSample, op_times
from jaxmorph.control.orchestrator import (
    Decision,
    Dwell,
    Option,
    Situation,
    changed_routes,
    decide,
    dwell_after,
    dwelling_links,
)
from jaxmorph.control.path_reports import NO_NEWS, PathNews, judge_paths
from jaxmorph.control.probes import Probes, found_by
from jaxmorph.control.profiler import Profile
from jaxmorph.control.verdicts import KnownWay, Verdict, dead_links
from jaxmorph.records import Link, Routes
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.planner import Plan
from jaxmorph.schedule.timeline import Timeline
from jaxmorph.training.planning_client import Chosen, Options, PlanningError, Retries

_STEPS_TO_SWAP = 2  # a step's timings are worked out during the next one, and obeyed after it


class Plans(Protocol):
    """What is needed of the planning process (`planning_client`)."""

    def weigh(self, profile: Profile, verdicts: Sequence[Verdict], held: Iterable[Link]) -> Options:
        """The plans that there are."""
        ...

    def adopt(self, chosen: int) -> Chosen:
        """Takes one of them for the plan in force."""
        ...

    def restart(self, in_force: Plan, programs: tuple[str, ...] | None) -> None:
        """Begins anew with what ranks run, after a failure; None: what they began with."""
        ...


class ControlLoop:
    """Watches links and decides on morphs, one at a time.

    Args:
        plan: The run's first plan, which is in force.
        planned_for: What ops and links cost when it was made.
        detector: Judges links; what it knows of them already is told with the first step.
        plans: The planning process; it has begun with the same plan.

    Attributes:
        paths: The links that do without their direct paths, also where steps are recorded.
    """

    def __init__(
        self,
        settings: Adaptation,
        plan: Plan,
        planned_for: Profile,
        usual: UsualLinks,
        detector: Detector,
        compute: ComputeWatch,
        plans: Plans,
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._programs: tuple[str, ...] | None = None  # as ranks were told; None: nothing yet
        self._usual = usual
        self._detector = detector
        dead = dead_links(detector.verdicts.values())
        steps = settings.failback_steps, settings.longest_dwell_steps
        self.paths = FailedPaths.begin(dead, *steps)
        self._compute = compute
        self._profile = planned_for
        self._plans = plans
        self._dwell = Dwell(settings.dwell_steps, settings.longest_dwell_steps)
        self._weigh_again_at = math.inf
        # Which ops have changed since it was weighed last; None: there is nothing to weigh.
        self._news: dict[tuple[int, OpKind], ComputeNotice] | None = None
        self._being_weighed: dict[tuple[int, OpKind], ComputeNotice] = {}  # was news; undecided yet
        self._has_turned_slow = False  # a link, since plans were asked for last
        self._verdicts = tuple(detector.verdicts.values())
        # Those that ail from the start, until they have been told.
        self._from_start = [*filter(None, (of_verdict(each, {}) for each in self._verdicts))]
        self._judged_routes: Routes | None = None  # None: there was no step yet
        self._knows_of_links = False  # more of links than was weighed
        self._latest: tuple[int, Profile, tuple[Verdict, ...]] = (-1, planned_for, ())
        self._untold: list[Happening] = []
        self._morph: Morph | None = None
        self._probes = Probes()
        # With beginning, weighing, or a morph that isn't in force yet.
        self._is_busy = False
        self._retries = Retries()
        self._must_restart = False
        self._lock = threading.Lock()  # for all that two threads change
        self._thread = ThreadPoolExecutor(1, "jaxmorph-orchestrator")

    def begin(self, begin: Callable[[], None]) -> None:
        """Have the planning process begin, before anything else is asked of it."""
        with self._lock:
            self._is_busy = True  # news are weighed once it has begun, or begun anew
            self._thread.submit(self._keep_error, self._begin, begin)

    def observe(
        self,
        step: int,
        timeline: Timeline,
        samples: Sequence[LinkSample],
        probes: Mapping[str, float] = MappingProxyType({}),
        paths: PathNews = NO_NEWS,
    ) -> list[Happening]:
        """Take in a step of the plan in force.

        A step in which a direct path failed is not measured by: whatever waited for the link, ops
        behind it included, may have waited in its times.

        Args:
            samples: What its messages took, apart from those that went by hosts for want of a
                direct path: see `link_samples`.
            probes: What messages of probes took before it, milliseconds, by their names.
            paths: What ranks have told of direct paths; each failure once (`read_paths`).

        Returns:
            What has happened since the last call, but for failures of direct paths.
        """
        of_links = [*self._from_start, *self._heed_paths(step, paths)]
        self._from_start, notices = [], []
        if not paths.is_disturbed:
            of_changed, notices = self._measure(step, timeline, samples)
            of_links += of_changed
        self._verdicts = tuple(self._detector.verdicts.values())
        self._judged_routes = self._plan.routes
        self._profile = replace(self._profile, costs=followed(self._profile.costs, notices))
        self._note_news(step, of_links, notices, has_failed=bool(paths.failures))
        of_probes = self._judge_probes(step, probes)
        with self._lock:
            happened = [*of_links, *map(of_notice, notices), *of_probes]
            told, self._untold = [*happened, *self._untold], []
            self._weigh_if_due(step)
        self.paths = self.paths.begin_again(paths.restored)
        return told

    def _heed_paths(self, step: int, news: PathNews) -> list[Happening]:
        """Judge links by what ranks tell of their direct paths."""
        routes = self._plan.routes
        judged = judge_paths(self.paths, self._detector, step, news, routes)
        self.paths, self._detector, happened = judged
        failed = [failure.link for failure in news.failures]
        if not failed:
            return happened
        with self._lock:
            self._probes.disbelieve(failed)
            # What no morph has to take off the queues has failed a probe.
            probed = [link for link in failed if routes.get(link) == "delegated"]
            self._dwell = self._dwell.after(probed, step)
        return happened

    def _measure(
        self, step: int, timeline: Timeline, samples: Sequence[LinkSample]
    ) -> tuple[list[Happening], list[ComputeNotice]]:
        """Judge links and ops by what they took."""
        before = self._detector.verdicts
        self._detector, changed = self._detector.observe(step, samples)
        self._compute, notices = self._compute.observe(step, op_times(timeline))
        told = (of_verdict(each, before) for each in changed)
        return [*filter(None, told)], notices

    def _note_news(
        self,
        step: int,
        of_links: Sequence[Happening],
        notices: Sequence[ComputeNotice],
        *,
        has_failed: bool,
    ) -> None:
        """Take note of what is to be weighed."""
        # A link that begins to recover is no news: whether it lasts is not yet known.
        has_changed = has_failed or any(each["kind"] != RECOVERING for each in of_links)
        is_slow = any(each["kind"] == DETECTED for each in of_links)
        with self._lock:
            self._latest = step, self._profile, self._verdicts
            if notices or has_changed:
                self._news = {**(self._news or {}), **{(n.stage, n.kind): n for n in notices}}
            self._knows_of_links |= has_changed
            self._has_turned_slow |= has_failed or is_slow
            if self._knows_of_links and self._probes.are_awaited:
                self._drop_awaited()  # a link that has turned slow doesn't wait for another one's

    def _begin(self, begin: Callable[[], None]) -> None:
        begin()
        with self._lock:
            self._is_busy = False
            self._weigh_if_due(self._latest[0])

    def _weigh_if_due(self, step: int) -> None:
        """Have plans weighed if there is reason to; with the lock held."""
        if self._is_due(step):
            self._is_busy = True
            self._thread.submit(self._keep_error, self._decide, *self._what_to_weigh())

    def _is_due(self, step: int) -> bool:
        """Whether to weigh plans now; with the lock held."""
        may_begin = self._retries.may_begin(step, has_turned_slow=self._has_turned_slow)
        if self._is_busy or not may_begin:
            return False
        return self._news is not None or step >= self._weigh_again_at

    def _what_to_weigh(self) -> tuple[int, Profile, tuple[Verdict, ...], tuple[str, ...]]:
        """The latest that is known; with the lock held. Afterwards none of it is news."""
        self._being_weighed, self._news = self._undecided(), None
        self._knows_of_links = self._has_turned_slow = False
        self._weigh_again_at = math.inf
        return *self._latest, ops_in_words(self._being_weighed)

    def _undecided(self) -> dict[tuple[int, OpKind], ComputeNotice]:
        """News, and what was when plans were asked for and is not decided; with the lock held."""
        return {**self._being_weighed, **(self._news or {})}

    def ready(self) -> Morph | None:
        """The morph that has been decided and not been asked for yet; waits for nothing."""
        with self._lock:
            morph, self._morph = self._morph, None
        return morph

    def due_probes(self) -> tuple[Link, ...]:
        """The direct links to be probed before they are used again; each is asked for once."""
        with self._lock:
            return self._probes.take_due()

    def without_path(self, links: Iterable[Link]) -> frozenset[Link]:
        """Those of some links whose direct paths have failed, as far as is known here by now."""
        return self.paths.failed.intersection(links)

    def adopted(self, morph: Morph) -> list[Happening]:
        """Take note that a morph is in force, for every step that is observed from now on."""
        with self._lock:
            self._plan, self._programs = morph.plan, morph.programs
            self._is_busy = False
        return of_morph(morph)

    def profile(self, profile: Profile) -> Profile:
        """What the plan in force is made of, with links as they have been judged last."""
        if self._judged_routes is None:
            return profile
        judged = links_under(
            self._verdicts,
            self._usual,
            self._judged_routes,
            self._plan.routes,
            margin_of_jitter=0.0,
        )
        has_verdict = {each.link for each in self._verdicts}
        links = {link: state for link, state in judged.items() if link in has_verdict}
        return replace(profile, links={**profile.links, **links})

    def link_states(self) -> dict[str, str]:
        """The links that are not healthy, each in a few words."""
        return states_in_words(self._verdicts)

    def known_ways(self) -> tuple[KnownWay, ...]:
        """What is to be remembered of links that are slow or dead, by the step observed last.

        It is asked for on the thread that observes.
        """
        return self._detector.known_ways()

    def close(self) -> None:
        """Stop deciding; what is being weighed is dropped once it is known."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _keep_error(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:  # training goes on, under the plan in force
            what = "" if isinstance(error, PlanningError) else f"{type(error).__name__}: "
            with self._lock:
                self._try_again_later(f"{what}{error}")

    def _try_again_later(self, error: str) -> None:
        """Plan again when some steps are over, if not too much has failed; with the lock held."""
        step = self._latest[0]
        self._retries = self._retries.after_failure(step)
        detail = f"{error}; {self._retries.in_words(step)}"
        self._untold.append({"kind": "planning_failed", "detail": detail})
        self._must_restart = True
        self._news = self._undecided()
        self._probes.forget()
        self._is_busy = self._retries.are_over

    def _drop_awaited(self) -> None:
        """Wait for no probe any more: what is to be done is weighed anew; with the lock held."""
        self._probes.forget()
        self._is_busy = False

    def _decide(
        self, step: int, profile: Profile, verdicts: tuple[Verdict, ...], news: tuple[str, ...]
    ) -> None:
        if self._must_restart:
            self._plans.restart(self._plan, self._programs)
            self._must_restart = False
        situation = self._weigh(step, profile, verdicts, news)
        with self._lock:  # meanwhile a link may have turned slow, or be well again
            latest = self._what_to_weigh() if self._knows_of_links else None
        if latest is not None:
            step, situation = latest[0], self._weigh(*latest)
        decision = decide(situation)
        with self._lock:
            if decision.wait_steps:
                self._weigh_again_at = step + decision.wait_steps
            unproven = self._probes.unproven(situation, decision)
            if unproven:  # it remains busy until it is known what they found
                self._probes.ask_for(unproven, situation, decision)
        if decision.chosen is None:
            self._keep(decision, situation)
        elif not unproven:
            self._make_ready(situation, decision)

    def _weigh(
        self, step: int, profile: Profile, verdicts: tuple[Verdict, ...], news: tuple[str, ...]
    ) -> Situation:
        from_step = step + _STEPS_TO_SWAP
        dwell = self._dwell  # a probe that is late puts another one in its place
        held = dwelling_links(dwell, self._plan.routes, from_step)
        options = self._plans.weigh(profile, verdicts, sorted(held))
        return Situation(
            step=from_step,
            verdicts=verdicts,
            in_force=Option(self._plan, options.in_force_ms),
            candidates=options.candidates,
            undisturbed_ms=options.undisturbed_ms,
            dwell=dwell,
            worth=self._settings.worth,
            may_delegate_healthy=self._settings.delegates == "any",
            news=news,
        )

    def _judge_probes(self, step: int, probes: Mapping[str, float]) -> list[Happening]:
        """What probes have found.

        If nothing speaks against what they were for, it is done; else it is weighed again.
        """
        if not probes:
            return []
        found = found_by(probes, self._detector, self.paths.failed)
        with self._lock:
            self._dwell = self._dwell.after(found.late, step)
            self._probes.note(found, step)
            self._heed_probes(bool(found.late))
        return found.told()

    def _heed_probes(self, any_is_late: bool) -> None:
        """Do what awaits probes, or weigh it again; with the lock held."""
        if not self._probes.are_awaited:
            return
        if any_is_late or self._news is not None:
            self._news = self._news or {}
            self._drop_awaited()
        elif (proven := self._probes.take_proven()) is not None:
            self._thread.submit(self._keep_error, self._make_ready, *proven)

    def _keep(self, decision: Decision, situation: Situation) -> None:
        evidence = evidence_of(situation, situation.in_force)
        happening = {"kind": "plan_kept", "detail": decision.reason, "evidence": evidence}
        with self._lock:
            self._untold.append(happening)
            self._is_busy = self._morph is not None  # one that ranks have yet to be told stays
            self._succeed()

    def _make_ready(self, situation: Situation, decision: Decision) -> None:
        number = decision.chosen or 0
        option, chosen = situation.candidates[number], self._plans.adopt(number)
        now = situation.in_force
        morph = Morph(
            plan=replace(
                option.plan, predicted_step_s=option.step_ms / 1e3, reason=decision.reason
            ),
            programs=chosen.programs,
            slots=chosen.slots,
            reason=decision.reason,
            routes=changed_routes(now.routes, option.routes),
            evidence=evidence_of(situation, option),
        )
        with self._lock:
            self._dwell = dwell_after(self._dwell, now, option, situation.step)
            self._probes.forget()  # a link that is direct from now on needs none
            self._morph = morph
            self._succeed()

    def _succeed(self) -> None:
        """Take note that what was weighed is decided, and done; with the lock held."""
        self._retries, self._being_weighed = Retries(), {}
