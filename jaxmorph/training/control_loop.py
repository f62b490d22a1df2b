"""Runs rank 0's controller: carries out its commands and feeds the answers back.

`control/controller.py` decides; the threads are here. The recorder's thread observes steps, a
second thread waits for the planning process, a third handles links that turn slow in mid-step, and
the training thread takes, at each exchange, what ranks do next. None of them holds up a step.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

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
    Idle,
    Observation,
    PlanChanged,
    PlanDropped,
    PlannerStarted,
    PlanningFailed,
    PlanWithdrawn,
    ProbeLinks,
    RequestCandidates,
    RestorePaths,
    Retries,
    StepObserved,
    WithdrawPlan,
)
from jaxmorph.control.events import ControlEvent, PlanChange
from jaxmorph.control.handover import SlowLink
from jaxmorph.control.late_directions import LateDirections
from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import simulate_step
from jaxmorph.program.instructions import RankInstructions, parse_instructions
from jaxmorph.records import Link
from jaxmorph.schedule.planner import Plan
from jaxmorph.schedule.timeline import Timeline
from jaxmorph.training.planning_client import Chosen, PlanningError, PlanningProcess, Simulated

_OPS_A_STEP, _OPS_HERE = 8192, 512
"""The most ops to simulate per training step. They take 0.1 s in the planning process or, without
one, 5 ms in this process."""


@dataclass(frozen=True)
class Morph:
    """A change of plan that ranks can carry out.

    Attributes:
        chosen: The plan as ranks run it. The planning process makes it during training, because a
            rank would need too long between two steps.
        restore: The links whose direct paths are restored with it.
        late: See `ChangePlan`.
        number: The plan's number in the planning process.
    """

    change: PlanChange
    chosen: Chosen
    restore: frozenset[Link] = frozenset()
    late: LateDirections = field(default_factory=dict)
    number: int = 0

    @property
    def plan(self) -> Plan:
        """The plan to run."""
        return self.change.plan

    @cached_property
    def parsed(self) -> tuple[RankInstructions, ...]:
        """Every rank's instructions; parsing them takes seconds at 64 stages."""
        return tuple(map(parse_instructions, self.chosen.programs))

    def simulate(self, profile: Profile) -> Timeline:
        """Simulate a step of the plan, like `PlanInForce.simulate`."""
        return simulate_step(self.parsed, profile, self.chosen.scarce)


Due: TypeAlias = Morph | ProbeLinks | RestorePaths
"""What ranks do after an exchange."""


@dataclass(frozen=True)
class Expected:
    """What is expected of a step before it runs.

    Attributes:
        number: The number of its plan.
        simulate: Simulates a step of that plan in this process.
    """

    number: int
    profile: Profile
    simulate: Callable[[Profile], Timeline]

    def in_this_process(self, *, with_times: bool = False) -> Simulated:
        """Simulate it here."""
        return Simulated.of(self.simulate(self.profile), with_times=with_times)


class ControlLoop:
    """The controller of a run, on rank 0.

    Args:
        plans: The planning process; None: the run does not adapt.
        keep: Called with the state before each observation, the observation and its outcome.

    Attributes:
        predicted: The latest simulation of a step of the plan that ranks run.
    """

    def __init__(
        self,
        state: ControllerState,
        plans: PlanningProcess | None,
        keep: Callable[[ControllerState, Observation, Advance], None] | None = None,
    ) -> None:
        self._state = state
        self._plans = plans
        self._keep = keep
        self._programs: tuple[str, ...] | None = None  # of the last morph; None: no morph yet
        self._number = self._last_number = 0  # of the plan that ranks run, and of the last chosen
        self.predicted = Simulated(1e3 * state.plan.predicted_step_s)
        self._predicting: Future[None] = Future()
        self._unsimulated, self._every = 0, 0.0  # steps
        self._simulations = Retries()  # after simulations that killed the planning process
        self._chosen: Chosen | None = None
        self._unreported: tuple[ControlEvent, ...] = ()  # of answers; reported with the next step
        self._due: Due | None = None
        # `_lock` guards the state, which all threads except the training thread advance. `_due`
        # has its own lock, so that training never waits while a step is being observed.
        self._lock, self._due_lock = threading.Lock(), threading.Lock()
        self._planner = ThreadPoolExecutor(1, "jaxmorph-planner")
        self._hearing = ThreadPoolExecutor(1, "jaxmorph-hearing")
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
            events, self._unreported = self._unreported, ()
            events += self._advance(seen)
            if self._error is not None:
                raise self._error
        return events

    def hear(self, slow: SlowLink) -> None:
        """Advance the controller in the middle of a step; no thread of the stage waits for it."""
        with suppress(RuntimeError):  # the loop is closed
            self._hearing.submit(self._answer, lambda slow: slow, slow)

    def take_due(self) -> Due | None:
        """Take what ranks do after the next exchange; later calls don't return it again."""
        with self._due_lock:
            due, self._due = self._due, None
        return due

    def plan_changed(self, morph: Morph) -> tuple[ControlEvent, ...]:
        """Report that ranks run a morph from the next observed step on."""
        with self._lock:
            self._programs, self._number = morph.chosen.programs, morph.number
            self.predicted = Simulated(1e3 * morph.plan.predicted_step_s)
            return self._advance(PlanChanged())

    def plan_dropped(self) -> tuple[ControlEvent, ...]:
        """Report that no rank runs the last morph."""
        with self._lock:
            return self._advance(PlanDropped())

    def expect(
        self,
        before: Expected | None,
        profile: Callable[[], Profile],
        simulate: Callable[[Profile], Timeline],
    ) -> Expected:
        """Have the next step simulated beside training, for `predicted`.

        Nothing waits for it, since the planning process may be busy for several steps.
        Steps with many ops are simulated only now and then.

        Args:
            before: What was expected of the previous step; None: simulate the next in any case.
            profile: Returns the costs as they are now.
            simulate: Simulates a step of the plan that ranks run, in this process.
        """
        self._unsimulated += 1
        if before is not None and self._unsimulated < self._every:
            return before
        self._unsimulated = 0
        expected = Expected(self._number, profile(), simulate)
        num_ops = sum(map(len, self._state.plan.schedule.orders))
        self._every = num_ops / (_OPS_HERE if self._plans is None else _OPS_A_STEP)
        is_first = self._number == 0 and self.predicted.bubble_rate is None
        # The first plan may be for declared delays. So its prediction is replaced at once if there
        # are few ops, which are quick to simulate.
        if self._plans is None or (is_first and num_ops <= _OPS_A_STEP):
            self.predicted = expected.in_this_process()
        else:
            self._predicting.cancel()  # at most one request waits behind others
            self._predicting = self._planner.submit(self._predict, expected)
        return expected

    def simulate_times(self, expected: Expected) -> "Future[Simulated]":
        """Simulate an expected step once more, with all its times."""
        if self._plans is not None:
            return self._planner.submit(self._simulate, expected, with_times=True)
        simulated: Future[Simulated] = Future()
        simulated.set_result(expected.in_this_process(with_times=True))
        return simulated

    def _predict(self, expected: Expected) -> None:
        with suppress(PlanningError):  # the last prediction stays
            predicted = self._simulate(expected)
            with self._lock:
                if expected.number == self._number:
                    self.predicted = predicted

    def _simulate(self, expected: Expected, *, with_times: bool = False) -> Simulated:
        step = max(0, self._state.step)  # -1 before the first one
        if self._state.must_restart_planner:
            raise PlanningError("the planning process is going to be restarted")
        if not self._simulations.may_begin(step, turned_slow=False):
            raise PlanningError("the planning process has died of the last simulation")
        plans = self._require_plans()
        try:
            simulated = plans.simulate(expected.number, expected.profile, with_times=with_times)
        except PlanningError as error:
            if plans.has_died:
                self._simulations = self._simulations.after_failure(step)
                self._has_died(str(error))
            raise
        self._simulations = Retries()
        return simulated

    def _has_died(self, error: str) -> None:
        """Have an idle controller restart the planning process; a busy one's request will fail."""
        with self._lock:
            if isinstance(self._state.phase, Idle) and not self._is_closing:
                self._unreported += self._advance(PlanningFailed(error))

    def close(self, end_process: Callable[[], None] = lambda: None) -> None:
        """Stop planning; `end_process` ends the planning process and any request to it."""
        with self._lock:
            self._is_closing = True  # else the broken request would count as a failure
        end_process()
        for thread in (self._hearing, self._planner):
            thread.shutdown(wait=True, cancel_futures=True)

    def _advance(self, observation: Observation) -> tuple[ControlEvent, ...]:
        """Advance the controller and carry out its commands; the caller holds `_lock`."""
        before, result = self._state, advance(self._state, observation)
        self._state = result.state
        for command in result.commands:
            self._carry_out(command)
        if self._keep is not None:
            try:
                self._keep(before, observation, result)
            except Exception as error:  # `observe` raises it: `_answer` has no caller to do so
                self._error = self._error or error
        return result.events

    def _carry_out(self, command: Command) -> None:
        match command:
            case RequestCandidates():
                self._planner.submit(self._answer, self._make_candidates, command)
            case ChooseCandidate():
                self._planner.submit(self._answer, self._choose, command)
            case ChangePlan(change, restore, late) if self._chosen is not None:
                self._put(Morph(change, self._chosen, restore, late, self._last_number))
            case ProbeLinks() | RestorePaths():
                self._put(command)
            case WithdrawPlan() if isinstance(self.take_due(), Morph):
                self._planner.submit(self._answer, lambda _: PlanWithdrawn(), command)
            case DropProbes() if isinstance(self._due, ProbeLinks):
                self._put(None)

    def _put(self, due: Due | None) -> None:
        with self._due_lock:
            self._due = due

    def _answer(self, work: Callable[[Any], Observation], command: Any) -> None:
        """Do some work for the controller, and feed the answer or error back."""
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
            plans.restart(self._state.plan, self._programs, self._number)
        return CandidatesReceived(
            plans.make_candidates(command.profile, command.verdicts, command.staying)
        )

    def _choose(self, command: ChooseCandidate) -> Observation:
        self._last_number += 1
        self._chosen = self._require_plans().choose(command.chosen, self._last_number)
        return CandidateChosen()

    def _require_plans(self) -> PlanningProcess:
        if self._plans is None:
            raise PlanningError("the run has no planning process")
        return self._plans
