"""Plans beside training: a process that rank 0 starts and asks.

`python -m jaxmorph.training.planning_process`.
A request is a line of JSON on standard input, its answer one on standard output: dataclasses of
`planning_client`. The process imports no JAX, leaves the processors to training, and ends when its
standard input does, and so with the process that has started it.
"""

import os

if __name__ == "__main__":
    os.nice(5)  # before all imports; with more of it, on a busy machine plans come steps too late

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO

from jaxmorph.config import Config
from jaxmorph.config.link_sections import Routes
from jaxmorph.control.conditions import UsualLinks, costs_differ, links_under
from jaxmorph.control.orchestrator import Option, Options
from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step
from jaxmorph.control.verdicts import Verdict, degraded_links
from jaxmorph.errors import UserError
from jaxmorph.plain_json import dump, parse_line, tagged
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.instructions import Channel, RankProgram, parse_program, program_text
from jaxmorph.program.lowering import forward_only
from jaxmorph.program.slots_needed import most_slots, slots_needed
from jaxmorph.records import Link, Route
from jaxmorph.schedule.planner import Plan
from jaxmorph.training.plan_in_force import plan_step
from jaxmorph.training.planning_client import (
    Adopt,
    Answer,
    Begin,
    Chosen,
    Failed,
    Ready,
    Request,
    Weigh,
)

Programs = tuple[RankProgram, ...]


@dataclass(frozen=True)
class Candidate:
    """A plan with its programs, checked by a replay of all ranks, and its predicted step."""

    plan: Plan
    programs: Programs
    step_ms: float


@dataclass(frozen=True)
class Weighed:
    """What there is to choose from.

    Attributes:
        in_force_ms: The predicted step of the plan in force under the conditions now.
        undisturbed_ms: The same if all links were healthy.
        candidates: The plan for healthy links, then others, those that differ least from it first.
    """

    in_force_ms: float
    undisturbed_ms: float
    candidates: tuple[Candidate, ...]


class CandidatePlanner:
    """Makes a run's candidates, and remembers which plan is in force.

    Args:
        num_tied: How many tied parameters the first and the last stage hold copies of.
        first: The run's plan for healthy links.
        profile: What it was planned for.
        usual: What healthy links do on either route.
        in_force: The plan in force; None: the first one.
        programs: What ranks run of it, as they were told last; None: as it is lowered for
            `profile`. What it was lowered for since can't be known from the plan.
    """

    def __init__(
        self,
        config: Config,
        num_tied: int,
        first: Plan,
        profile: Profile,
        usual: UsualLinks,
        in_force: Plan | None = None,
        programs: Programs | None = None,
    ) -> None:
        self._config = config
        self._num_tied = num_tied
        self._usual = usual
        self._first, self._planned_for = first, profile
        now = in_force or first
        programs = programs or self._planned_programs(now)
        self._in_force = Candidate(now, programs, 1e3 * now.predicted_step_s)

    @property
    def programs(self) -> Programs:
        """Every rank's instructions under the plan in force."""
        return self._in_force.programs

    def weigh(
        self, profile: Profile, verdicts: Sequence[Verdict], held: Iterable[Link] = ()
    ) -> Weighed:
        """The candidates for what ops and links cost now, with direct transfers holding queues.

        Args:
            profile: The ops' costs; its links are not looked at.
            verdicts: On the directions of links, under the routes of the plan in force.
            held: Delegated links that can't go back yet, be they healthy or not.
        """
        now = self._in_force
        plans = self._plans(profile, verdicts, held)
        return Weighed(
            in_force_ms=self._step_ms(now.programs, now.plan, profile, verdicts),
            undisturbed_ms=self._step_ms(now.programs, now.plan, profile, ()),
            candidates=tuple(self._candidate(plan, profile, verdicts) for plan in plans),
        )

    def adopt(self, candidate: Candidate) -> dict[Channel, int]:
        """Take a candidate for the plan in force from now on; the slots its channels need."""
        self._in_force = candidate
        needed = slots_needed(candidate.programs)
        if self._config.evaluation.every_steps is None:
            return needed
        return most_slots(needed, slots_needed([*map(forward_only, candidate.programs)]))

    def _plans(
        self, profile: Profile, verdicts: Sequence[Verdict], held: Iterable[Link]
    ) -> Iterator[Plan]:
        """The first plan, and others on each of the routes that may be wanted."""
        first = self._first
        yield first
        to_delegate = frozenset(self._to_delegate(verdicts))
        is_other = bool(to_delegate) or costs_differ(profile.costs, self._planned_for.costs)
        for links in self._delegations(to_delegate, frozenset(held)):
            routes: dict[Link, Route] = {**first.routes, **dict.fromkeys(links, "delegated")}
            if links:
                yield replace(first, routes=routes)
            if links != to_delegate and not self._is_first_order():
                yield replace(self._in_force.plan, routes=routes)
            if is_other:  # else a plan made anew would differ from the first by noise alone
                yield from self._made_anew(routes, profile, verdicts)
        every: dict[Link, Route] = dict.fromkeys(first.routes, "delegated")
        may_be_healthy = is_other and self._config.adaptation.delegates == "any"
        if may_be_healthy and every != {**first.routes, **dict.fromkeys(to_delegate, "delegated")}:
            yield from self._made_anew(every, profile, verdicts)

    def _is_first_order(self) -> bool:
        now, first = self._in_force.plan, self._first
        return now.schedule == first.schedule and now.offloading == first.offloading

    def _delegations(
        self, degraded: frozenset[Link], held: frozenset[Link]
    ) -> list[frozenset[Link]]:
        """The sets of links to delegate: those that ail, with those that can't go back, with all.

        With all that are delegated where one ails anew: it is not to wait until others are back.
        """
        delegated = _delegated(self._in_force.plan)
        now = delegated - _delegated(self._first)
        sets = [
            degraded,
            degraded | (held & now),
            *([degraded | now] if degraded - delegated else []),
        ]
        return list(dict.fromkeys(sets))

    def _made_anew(
        self, routes: Mapping[Link, Route], profile: Profile, verdicts: Sequence[Verdict]
    ) -> Iterator[Plan]:
        """The plan made for what is now on some routes, if the caps leave room for one."""
        believed = self._profile(routes, profile, verdicts)
        with suppress(UserError):
            yield plan_step(self._replanning(routes), believed, self._num_tied)

    def _to_delegate(self, verdicts: Sequence[Verdict]) -> list[Link]:
        """The links that ail, if messages of every microbatch, or tied gradients, travel them."""
        last = self._config.parallelism.stages - 1
        tied = {Link(0, last)} if self._num_tied and last > 0 else set()
        return sorted(degraded_links(verdicts) & (self._first.routes.keys() | tied))

    def _replanning(self, routes: Mapping[Link, Route]) -> Config:
        """The configuration under which to plan anew: the paper's planner stays the paper's."""
        config = self._config
        name = "paper" if config.schedule.name == "paper" else "adaptive"
        named = {str(link): route for link, route in routes.items()}
        merged = {"default": config.routes.default, **named}
        return config.model_copy(
            update={
                "routes": Routes.model_validate(merged),
                "schedule": config.schedule.model_copy(update={"name": name}),
            }
        )

    def _candidate(self, plan: Plan, profile: Profile, verdicts: Sequence[Verdict]) -> Candidate:
        now = self._in_force
        same_order = plan.schedule == now.plan.schedule and plan.offloading == now.plan.offloading
        if same_order and plan.routes == now.plan.routes:
            programs = now.programs
        else:
            programs = self._programs(plan, profile, verdicts)
        return Candidate(plan, programs, self._step_ms(programs, plan, profile, verdicts))

    def _planned_programs(self, plan: Plan) -> Programs:
        """What ranks run of a plan that was made for what the first one was."""
        profile = self._planned_for
        return lower_step(plan.schedule, profile, plan.routes, self._num_tied, plan.offloading)

    def _programs(self, plan: Plan, profile: Profile, verdicts: Sequence[Verdict]) -> Programs:
        believed = self._profile(plan.routes, profile, verdicts)
        return lower_step(plan.schedule, believed, plan.routes, self._num_tied, plan.offloading)

    def _step_ms(
        self, programs: Programs, plan: Plan, profile: Profile, verdicts: Sequence[Verdict]
    ) -> float:
        actual = self._profile(plan.routes, profile, verdicts, margin_of_jitter=0.0)
        return simulate_blocking(
            programs, actual.costs, actual.links, copies=actual.copies
        ).makespan_ms

    def _profile(
        self,
        routes: Mapping[Link, Route],
        profile: Profile,
        verdicts: Sequence[Verdict],
        **margin: float,
    ) -> Profile:
        """What a step would be made of under a plan's routes."""
        now = self._in_force.plan.routes
        return replace(profile, links=links_under(verdicts, self._usual, now, routes, **margin))


def _delegated(plan: Plan) -> frozenset[Link]:
    return frozenset(link for link, route in plan.routes.items() if route == "delegated")


def planner_of(request: Begin) -> CandidatePlanner:
    """What a request describes."""
    run, programs = request.run, request.programs
    return CandidatePlanner(
        run.config,
        run.num_tied,
        run.first,
        run.profile,
        run.usual,
        request.in_force,
        None if programs is None else tuple(map(parse_program, programs)),
    )


class Answering:
    """Answers requests, one after another."""

    def __init__(self) -> None:
        self._planner: CandidatePlanner | None = None
        self._candidates: tuple[Candidate, ...] = ()

    def answer(self, line: str) -> Answer:
        """The answer to a request; a mistake in it is answered too."""
        try:
            return self._answer(parse_line(Request, line, "a request"))
        except Exception as error:  # training goes on without it, and tells why
            return Failed(f"{type(error).__name__}: {error}")

    def _answer(self, request: Request) -> Answer:
        match request:
            case Begin():
                self._planner = planner_of(request)
                return Ready()
            case Weigh(profile, verdicts, held):
                weighed = self._begun.weigh(profile, verdicts, held)
                self._candidates = weighed.candidates
                options = tuple(Option(each.plan, each.step_ms) for each in weighed.candidates)
                return Options(weighed.in_force_ms, weighed.undisturbed_ms, options)
            case Adopt(chosen):
                candidate = self._candidates[chosen]
                slots = self._begun.adopt(candidate)
                return Chosen(tuple(map(program_text, candidate.programs)), slots)

    @property
    def _begun(self) -> CandidatePlanner:
        if self._planner is None:
            raise ValueError("asked before it was told what runs")
        return self._planner


def serve(requests: Iterator[str], answers: IO[str]) -> None:
    """Answer requests until there are no more."""
    answering = Answering()
    for line in requests:
        answers.write(dump(tagged(answering.answer(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(iter(sys.stdin), sys.stdout)
