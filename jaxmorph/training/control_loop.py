"""Runs rank 0's controller: carries out its commands and feeds the answers back.

`control/controller.py` decides; the threads are here. The recorder's thread observes steps, a
second thread waits for the planning process, and the training thread takes at each exchange what
ranks do next. None of them holds up a step.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

from jaxmorph.control.controller import advance
from jaxmorph.control.controller_state import (
    Advance,
    CandidateChosen,
    CandidatesReceived,
    ChangePlan,
    ChooseCandidate,
    Command,
    ControllerState,
    DropProbes,
    Observation,
    PlanChanged,
    PlanDropped,
    PlannerStarted,
    PlanningFailed,
    ProbeLinks,
    RequestCandidates,
    StepObserved,
)
from jaxmorph.control.events import ControlEvent, PlanChange
from jaxmorph.control.late_once import LateOnce
from jaxmorph.control.orchestrator import Options
from jaxmorph.control.profiler import Profile
from jaxmorph.control.rank_times import texts_of
from jaxmorph.control.verdicts import Verdict
from jaxmorph.program.instructions import Channel, RankInstructions, parse_instructions
from jaxmorph.records import Link
from jaxmorph.schedule.planner import Plan
from jaxmorph.schedule.timeline import Timeline
from jaxmorph.training.plan_in_force import simulate_step
from jaxmorph.training.planning_client import Chosen, PlanningError, Predicted

_PREDICTED_S = 60.0  # it may be planning
_Answer = TypeVar("_Answer")


class Plans(Protocol):
    """What the controller needs of the planning process (`planning_client.PlanningProcess`)."""

    def make_candidates(
        self, profile: Profile, verdicts: Sequence[Verdict], staying: Iterable[Link]
    ) -> Options:
        """The candidates."""
        ...

    def choose(self, chosen: int) -> Chosen:
        """Makes one of them the plan in force."""
        ...

    def adopt(self) -> None:
        """Predicts steps of the last chosen plan from now on."""
        ...

    def predict(self, step: int, profile: Profile) -> Predicted:
        """Simulates a step of the plan that ranks run."""
        ...

    def draw(self, step: int) -> tuple[str, ...]:
        """The JSON of each rank's `RankTimes` in one of the last predicted steps."""
        ...

    def restart(self, in_force: Plan, programs: tuple[str, ...] | None) -> None:
        """Begins again after a failure, with the instructions that ranks run; None: the first."""
        ...


@dataclass(frozen=True)
class Morph:
    """A change of plan that ranks can carry out.

    Attributes:
        programs: Every rank's instructions, as `instructions_text` writes them. The planning
            process makes them beside training; a rank would need too long between two steps.
        slots: The number of slots of each delegated channel.
        restore: The links whose failed direct paths are restored with it.
        late_once: See `ChangePlan`.
        scarce: The slots of channels whose sends may wait for one.
    """

    change: PlanChange
    programs: tuple[str, ...]
    slots: Mapping[Channel, int]
    restore: frozenset[Link] = field(default_factory=frozenset)
    late_once: tuple[LateOnce, ...] = ()
    scarce: Mapping[Channel, int] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """The plan to run."""
        return self.change.plan

    @cached_property
    def parsed(self) -> tuple[RankInstructions, ...]:
        """Every rank's instructions; at 64 stages it takes seconds to read them."""
        return tuple(map(parse_instructions, self.programs))

    def simulate(self, profile: Profile) -> Timeline:
        """A step of the plan, as `PlanInForce.simulate`."""
        return simulate_step(self.parsed, profile, self.scarce)


@dataclass(frozen=True)
class Foreseen:
    """A step as it was expected to be.

    The planning process simulates it. A run without one, or whose process has died, does so here.

    Attributes:
        simulate: Simulates a step of its plan.
        predicted: The answer of the planning process.
        draw: Has the process draw the step.
    """

    profile: Profile
    simulate: Callable[[Profile], Timeline]
    predicted: Future[Predicted]
    draw: Callable[[], Future[tuple[str, ...]]]

    def prediction(self) -> Predicted:
        """Its time and its bubbles."""
        try:
            return self.predicted.result(_PREDICTED_S)
        except (PlanningError, TimeoutError, CancelledError):
            timeline = self.simulate(self.profile)
            return Predicted(timeline.makespan_ms, timeline.bubble_rate)

    def drawn(self) -> tuple[str, ...]:
        """The JSON of each rank's `RankTimes`."""
        try:
            return self.draw().result(_PREDICTED_S)
        except (PlanningError, TimeoutError, CancelledError):
            return texts_of(self.simulate(self.profile))


class ControlLoop:
    """The controller of a run, on rank 0.

    Args:
        plans: The planning process; None: the run does not adapt.
        keep: Called with the state before each observation, the observation and its outcome.
    """

    def __init__(
        self,
        state: ControllerState,
        plans: Plans | None,
        keep: Callable[[ControllerState, Observation, Advance], None] | None = None,
    ) -> None:
        self._state = state
        self._plans = plans
        self._keep = keep
        self._programs: tuple[str, ...] | None = None  # of the last morph; None: the first ones
        self._chosen: Chosen | None = None
        self._unreported: tuple[ControlEvent, ...] = ()  # of answers; reported with the next step
        self._due: Morph | ProbeLinks | None = None
        # `_lock` guards the state, which the recorder's and the planner's threads advance. `_due`
        # has its own lock, so that training never waits while a step is being observed.
        self._lock, self._due_lock = threading.Lock(), threading.Lock()
        self._planner = ThreadPoolExecutor(1, "jaxmorph-planner")
        self._is_closing = False
        self._error: Exception | None = None  # of `keep`

    @property
    def state(self) -> ControllerState:
        """The current state."""
        return self._state

    def start(self, start: Callable[[], None]) -> None:
        """Start the planning process on the planner's thread."""
        self._planner.submit(self._answer, self._started, start)

    def observe(self, seen: StepObserved) -> tuple[ControlEvent, ...]:
        """Advance the controller by a step; return the events to report, in order."""
        with self._lock:
            events = self._advance(seen) + self._unreported
            self._unreported = ()
            if self._error is not None:
                raise self._error
        return events

    def take_due(self) -> Morph | ProbeLinks | None:
        """Take what ranks do after the next exchange, each once."""
        with self._due_lock:
            due, self._due = self._due, None
        return due

    def plan_changed(self, morph: Morph) -> tuple[ControlEvent, ...]:
        """Report that ranks run a morph from the next observed step on."""
        with self._lock:
            self._programs = morph.programs
            if self._plans is not None:
                self._planner.submit(self._asked, lambda plans: plans.adopt())
            return self._advance(PlanChanged())

    def plan_dropped(self) -> tuple[ControlEvent, ...]:
        """Report that no rank runs the last morph."""
        with self._lock:
            return self._advance(PlanDropped())

    def foresee(
        self, step: int, profile: Profile, simulate: Callable[[Profile], Timeline]
    ) -> Foreseen:
        """Have the planning process simulate a step of the plan that ranks run.

        Args:
            simulate: Does so here if that process can't.
        """
        predict = partial(self._asked, lambda plans: plans.predict(step, profile))
        draw = partial(self._asked, lambda plans: plans.draw(step))
        return Foreseen(
            profile, simulate, self._planner.submit(predict), partial(self._planner.submit, draw)
        )

    def _asked(self, ask: Callable[[Plans], _Answer]) -> _Answer:
        try:
            return ask(self._require_plans())
        except Exception as error:  # what fails here is done in this process
            raise PlanningError(str(error)) from error

    def close(self, end_process: Callable[[], None] = lambda: None) -> None:
        """Stop planning; `end_process` ends the planning process, with any request to it."""
        with self._lock:
            self._is_closing = True  # else the broken request would count as a failure
        end_process()
        self._planner.shutdown(wait=True, cancel_futures=True)

    def _advance(self, observation: Observation) -> tuple[ControlEvent, ...]:
        """Advance the controller and carry out its commands; the caller holds `_lock`."""
        before, result = self._state, advance(self._state, observation)
        self._state = result.state
        for command in result.commands:
            self._carry_out(command)
        if self._keep is not None:
            try:
                self._keep(before, observation, result)
            except Exception as error:  # `observe` raises it: no caller waits for an answer
                self._error = self._error or error
        return result.events

    def _carry_out(self, command: Command) -> None:
        match command:
            case RequestCandidates():
                self._planner.submit(self._answer, self._make_candidates, command)
            case ChooseCandidate():
                self._planner.submit(self._answer, self._choose, command)
            case ChangePlan(change, restore, late_once) if self._chosen is not None:
                made = self._chosen
                morph = Morph(change, made.programs, made.slots, restore, late_once, made.scarce)
                self._put(morph)
            case ProbeLinks():
                self._put(command)
            case DropProbes() if isinstance(self._due, ProbeLinks):
                self._put(None)

    def _put(self, due: Morph | ProbeLinks | None) -> None:
        with self._due_lock:
            self._due = due

    def _answer(self, work: Callable[[Any], Observation], command: Any) -> None:
        """Feed the answer of the planning process, or its error, back to the controller."""
        try:
            answer = work(command)
        except PlanningError as error:
            answer = PlanningFailed(str(error))
        except Exception as error:  # training goes on, under the plan in force
            answer = PlanningFailed(f"{type(error).__name__}: {error}")
        with self._lock:
            if self._is_closing:
                return
            try:
                events = self._advance(answer)
            except Exception as error:  # the controller itself failed: plan again later
                events = self._advance(PlanningFailed(f"{type(error).__name__}: {error}"))
            self._unreported += events

    def _started(self, start: Callable[[], None]) -> Observation:
        start()
        return PlannerStarted()

    def _make_candidates(self, command: RequestCandidates) -> Observation:
        plans = self._require_plans()
        if command.restart_planner:
            plans.restart(self._state.plan, self._programs)
        return CandidatesReceived(
            plans.make_candidates(command.profile, command.verdicts, command.staying)
        )

    def _choose(self, command: ChooseCandidate) -> Observation:
        self._chosen = self._require_plans().choose(command.chosen)
        return CandidateChosen()

    def _require_plans(self) -> Plans:
        if self._plans is None:
            raise PlanningError("the run has no planning process")
        return self._plans
