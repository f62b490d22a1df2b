"""The planning process, which rank 0 starts: `python -m jaxmorph.training.planning_process`.

A request is a line of JSON on standard input, its answer a line on standard output; both are
dataclasses of `planning_client`. The process imports no JAX. It ends when its standard input ends,
and so when rank 0 ends.
"""

import os

if __name__ == "__main__":
    # Before all imports, which would compete with training. A higher value makes plans come steps
    # too late on a busy machine.
    os.nice(5)

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import IO

from jaxmorph.config import Config
from jaxmorph.control.conditions import costs_differ, links_under
from jaxmorph.control.controller_state import RequestCandidates
from jaxmorph.control.link_state import delegated_links
from jaxmorph.control.orchestrator import Option, Options
from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step, simulate_step, step_in_slots_ms
from jaxmorph.control.verdicts import Verdict, degraded_links
from jaxmorph.errors import UserError
from jaxmorph.plain_json import dump, parse_line, tagged
from jaxmorph.program.instructions import (
    Channel,
    RankInstructions,
    instructions_text,
    parse_instructions,
)
from jaxmorph.program.lowering import forward_only
from jaxmorph.program.slots_needed import most_slots, scarce_slots, slots_needed
from jaxmorph.records import Link, Route
from jaxmorph.schedule.planner import Plan
from jaxmorph.training.plan_in_force import plan_step, slots_of_plan
from jaxmorph.training.planning_client import (
    Answer,
    Begin,
    Choose,
    Chosen,
    Failed,
    Ready,
    Request,
    Simulate,
    Simulated,
)

_LAST_PLANS = 3  # to simulate: also the one before a change, and one that ranks may drop
Instructions = tuple[RankInstructions, ...]
Slots = dict[Channel, int]


@dataclass(frozen=True)
class Candidate:
    """A plan, all ranks' instructions, checked by a replay, and its predicted step.

    Attributes:
        slots: Of each delegated channel, where host memory is limited.
        scarce: The slots of channels whose sends may wait for one.
    """

    plan: Plan
    programs: Instructions
    step_ms: float
    slots: Slots | None = None
    scarce: Slots = field(default_factory=dict)


class CandidatePlanner:
    """Makes a run's candidates: the home plan, then others, those that differ least from it first.

    Attributes:
        candidates: Those of the last `make_candidates`.
    """

    def __init__(self, begin: Begin) -> None:
        self._run, now = begin.run, begin.in_force
        if begin.programs is None:
            programs = self._lowered(now, self._run.profile)
        else:
            programs = tuple(map(parse_instructions, begin.programs))
        slots = self._slots(programs)
        self._in_force = Candidate(now, programs, 1e3 * now.predicted_step_s, *slots)
        self._last = {begin.number: self._in_force}
        self.candidates: tuple[Candidate, ...] = ()

    @property
    def programs(self) -> Instructions:
        """Every rank's instructions under the plan in force."""
        return self._in_force.programs

    def make_candidates(
        self, profile: Profile, verdicts: Sequence[Verdict], staying: Iterable[Link] = ()
    ) -> Options:
        """The candidates under the current costs; in all predictions direct transfers hold queues.

        Args:
            profile: The costs of ops; its links are ignored.
            verdicts: Under the routes of the plan in force.
            staying: Delegated links that can't go back yet, healthy or not.
        """
        now = self._in_force
        plans = self._plans(profile, verdicts, staying)
        made = (self._candidate(plan, profile, verdicts) for plan in plans)
        # With few slots ranks might wait for one another for ever (an infinite step), except under
        # the home plan.
        self.candidates = tuple(
            each for at, each in enumerate(made) if at == 0 or each.step_ms < math.inf
        )
        return Options(
            in_force_ms=self._step_ms(now, profile, verdicts),
            undisturbed_ms=self._step_ms(now, profile, ()),
            candidates=tuple(Option(each.plan, each.step_ms) for each in self.candidates),
        )

    def choose(self, chosen: int, number: int = 0) -> Chosen:
        """Make one of the candidates the plan in force, with a number for `simulate`."""
        self._in_force = self.candidates[chosen]
        self._last = dict([*self._last.items(), (number, self._in_force)][-_LAST_PLANS:])
        programs, slots = self._in_force.programs, self._in_force.slots
        if slots is None:
            slots = self._needed(programs)
        return Chosen(tuple(map(instructions_text, programs)), slots, self._in_force.scarce)

    def _needed(self, programs: Instructions) -> Slots:
        """The slots with which no send waits, in steps and in evaluations."""
        slots = slots_of_plan(self._run.config, programs)
        if self._run.config.evaluation.every_steps is None:
            return slots
        return most_slots(slots, slots_needed([*map(forward_only, programs)]))

    def _slots(self, programs: Instructions) -> tuple[Slots | None, Slots]:
        """The slots of a plan within limited host memory, and those that are scarce."""
        if self._run.room is None or self._run.room.rank_bytes is None:
            return None, {}
        needed = slots_needed(programs)
        given = self._run.room.slots_that_fit(needed, self._needed(programs))
        return given, scarce_slots(given, needed)

    def simulate(self, number: int, profile: Profile, *, with_times: bool = False) -> Simulated:
        """A step of one of the last plans in force."""
        plan = self._last.get(number)
        if plan is None:
            raise ValueError(f"got plan {number}, expected one of {[*self._last]}")
        timeline = simulate_step(plan.programs, profile, plan.scarce)
        return Simulated.of(timeline, with_times=with_times)

    def _plans(
        self, profile: Profile, verdicts: Sequence[Verdict], staying: Iterable[Link]
    ) -> Iterator[Plan]:
        """The home plan, then for each useful set of delegated links: known orders, and a new one.

        Known orders come first: of plans that are equally good, the orchestrator takes the one
        that changes least.
        """
        home = self._run.home
        yield home
        to_delegate = frozenset(self._to_delegate(verdicts))
        has_changed = bool(to_delegate) or costs_differ(profile.costs, self._run.profile.costs)
        for links in self._delegations(to_delegate, frozenset(staying)):
            routes: dict[Link, Route] = {**home.routes, **dict.fromkeys(links, "delegated")}
            if links:
                yield replace(home, routes=routes)
            if links != to_delegate and not _is_same_order(self._in_force.plan, home):
                yield replace(self._in_force.plan, routes=routes)
            if has_changed:  # else a new plan would differ from the home plan by noise alone
                yield from self._new_plan(routes, profile, verdicts)
        every: dict[Link, Route] = dict.fromkeys(home.routes, "delegated")
        may_delegate_all = has_changed and self._run.config.adaptation.delegates == "any"
        if may_delegate_all and every != {**home.routes, **dict.fromkeys(to_delegate, "delegated")}:
            yield from self._new_plan(every, profile, verdicts)

    def _delegations(
        self, degraded: frozenset[Link], staying: frozenset[Link]
    ) -> list[frozenset[Link]]:
        """The sets of links to delegate: the degraded ones alone, and with others.

        The others are the links that must stay delegated and, when a link has just degraded, all
        that are delegated now: its change must not wait until another link may go back.
        """
        delegated = delegated_links(self._in_force.plan.routes)
        now = delegated - delegated_links(self._run.home.routes)
        sets = [
            degraded,
            degraded | (staying & now),
            *([degraded | now] if degraded - delegated else []),
        ]
        return list(dict.fromkeys(sets))

    def _new_plan(
        self, routes: Mapping[Link, Route], profile: Profile, verdicts: Sequence[Verdict]
    ) -> Iterator[Plan]:
        """A plan made for the current costs; none if the caps leave no room for one."""
        expected = self._profile(routes, profile, verdicts)
        with suppress(UserError):
            yield plan_step(self._config_on(routes), expected, self._run.num_tied, self._run.room)

    def _to_delegate(self, verdicts: Sequence[Verdict]) -> list[Link]:
        """The degraded links that activations, gradients or tied gradients take."""
        ends = self._run.config.placement.ends_link
        tied = {ends} if self._run.num_tied and ends else set()
        return sorted(degraded_links(verdicts) & (self._run.home.routes.keys() | tied))

    def _config_on(self, routes: Mapping[Link, Route]) -> Config:
        """The configuration of a new plan: `paper` is replaced by another `paper` plan only."""
        config = self._run.config
        name = "paper" if config.schedule.name == "paper" else "adaptive"
        named: dict[str, Route] = {str(link): route for link, route in routes.items()}
        return config.model_copy(
            update={
                "routes": config.routes.with_links(named),
                "schedule": config.schedule.model_copy(update={"name": name}),
            }
        )

    def _candidate(self, plan: Plan, profile: Profile, verdicts: Sequence[Verdict]) -> Candidate:
        now = self._in_force
        if _is_same_order(plan, now.plan) and plan.routes == now.plan.routes:
            programs, slots = now.programs, (now.slots, now.scarce)
        else:
            programs = self._lowered(plan, self._profile(plan.routes, profile, verdicts))
            slots = self._slots(programs)
        candidate = Candidate(plan, programs, 0.0, *slots)
        return replace(candidate, step_ms=self._step_ms(candidate, profile, verdicts))

    def _lowered(self, plan: Plan, profile: Profile) -> Instructions:
        return lower_step(plan.schedule, profile, plan.routes, self._run.num_tied, plan.offloading)

    def _step_ms(
        self, candidate: Candidate, profile: Profile, verdicts: Sequence[Verdict]
    ) -> float:
        actual = self._profile(candidate.plan.routes, profile, verdicts, margin_of_jitter=0.0)
        return step_in_slots_ms(candidate.programs, actual, candidate.scarce)

    def _profile(
        self,
        routes: Mapping[Link, Route],
        profile: Profile,
        verdicts: Sequence[Verdict],
        **margin: float,
    ) -> Profile:
        """The costs of a step on a plan's routes."""
        now = self._in_force.plan.routes
        return replace(profile, links=links_under(verdicts, self._run.usual, now, routes, **margin))


def _is_same_order(one: Plan, other: Plan) -> bool:
    return one.schedule == other.schedule and one.offloading == other.offloading


def _answer(planner: CandidatePlanner, request: RequestCandidates | Choose | Simulate) -> Answer:
    match request:
        case RequestCandidates(profile, verdicts, staying):
            return planner.make_candidates(profile, verdicts, staying)
        case Choose(chosen, number):
            return planner.choose(chosen, number)
        case Simulate(number, profile, with_times):
            return planner.simulate(number, profile, with_times=with_times)


def serve(requests: Iterator[str], answers: IO[str]) -> None:
    """Answer requests one after another, including invalid ones, until there are no more."""
    planner: CandidatePlanner | None = None
    for line in requests:
        answer: Answer = Ready()
        try:
            request: Request = parse_line(Request, line, "a request")
            if isinstance(request, Begin):
                planner = CandidatePlanner(request)
            elif planner is None:
                raise ValueError("got another request first, expected Begin")
            else:
                answer = _answer(planner, request)
        except Exception as error:  # rank 0 reports it, and training continues
            answer = Failed(f"{type(error).__name__}: {error}")
        answers.write(dump(tagged(answer)) + "\n")
        answers.flush()


if __name__ == "__main__":
    try:
        serve(iter(sys.stdin), sys.stdout)
    except BrokenPipeError:  # rank 0 has ended: add nothing to the end of its log
        os._exit(0)
