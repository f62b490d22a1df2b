"""Rank 0's controller at work: carries out its commands and feeds the answers back.

What is decided is `control/controller.py`'s. Here are the threads around it: a step is observed
where its records are made; a thread that mostly waits asks the planning process; and the thread
that trains takes, at a meeting, what ranks are to do next. None of them holds up a step.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxmorph.control.controller import advance
from jaxmorph.control.controller_state import (
    Advance,
    ChangePlan,
    Command,
    ControllerState,
    DropProbes,
    FetchPrograms,
    Observation,
    PlanChanged,
    PlannerStarted,
    PlanningFailed,
    PlansWeighed,
    ProbeLinks,
    ProgramsFetched,
    StepObserved,
    WeighPlans,
)
from jaxmorph.control.events import ControlEvent, PlanChange
from jaxmorph.control.orchestrator import Options
from jaxmorph.control.profiler import Profile
from jaxmorph.control.verdicts import Verdict
from jaxmorph.program.instructions import Channel
from jaxmorph.records import Link
from jaxmorph.schedule.planner import Plan
from jaxmorph.training.planning_client import Chosen, PlanningError


class Plans(Protocol):
    """What the controller needs of the planning process (`planning_client`)."""

    def weigh(self, profile: Profile, verdicts: Sequence[Verdict], held: Iterable[Link]) -> Options:
        """The plans that there are."""
        ...

    def adopt(self, chosen: int) -> Chosen:
        """Takes one of them for the plan in force."""
        ...

    def restart(self, in_force: Plan, programs: tuple[str, ...] | None) -> None:
        """Begins anew with what ranks run, after a failure; None: what they began with."""
        ...


@dataclass(frozen=True)
class Morph:
    """A change of plan that ranks can carry out.

    Attributes:
        programs: Every rank's instructions, as `program_text` writes them: what a rank needs is
            made once, where time doesn't matter, and not by every rank between two steps.
        slots: How many slots each delegated channel needs.
        restore: The links whose direct paths have failed, and begin again with it.
    """

    change: PlanChange
    programs: tuple[str, ...]
    slots: Mapping[Channel, int]
    restore: frozenset[Link] = field(default_factory=frozenset)

    @property
    def plan(self) -> Plan:
        """The plan to run."""
        return self.change.plan


class ControlLoop:
    """The controller of a run, on rank 0.

    `_lock` guards the state: the thread that makes records and the one that plans advance it. What
    is due at the next meeting has a lock of its own, so that training never waits for a step to be
    observed.

    Args:
        plans: The planning process; None: the run does not adapt, and nothing is asked of it.
        keep: Takes the state before an observation, the observation, and what followed.
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
        self._lock, self._due_lock = threading.Lock(), threading.Lock()
        self._planner = ThreadPoolExecutor(1, "jaxmorph-planner")
        self._is_closing = False
        self._error: Exception | None = None  # of keeping an observation

    @property
    def state(self) -> ControllerState:
        """The state as it is now."""
        return self._state

    def start(self, start: Callable[[], None]) -> None:
        """Have the planning process start; news wait for it."""
        self._planner.submit(self._answer, self._started, start)

    def observe(self, seen: StepObserved) -> tuple[ControlEvent, ...]:
        """Take in a step of the plan in force.

        Returns:
            What is to be reported with it, in order.
        """
        with self._lock:
            events = self._advance(seen) + self._unreported
            self._unreported = ()
            if self._error is not None:
                raise self._error
        return events

    def take_due(self) -> Morph | ProbeLinks | None:
        """What ranks are to do after the next meeting, each once."""
        with self._due_lock:
            due, self._due = self._due, None
        return due

    def adopted(self, morph: Morph) -> tuple[ControlEvent, ...]:
        """A morph is in force, for every step that is observed from now on."""
        with self._lock:
            self._programs = morph.programs
            return self._advance(PlanChanged())

    def close(self, end_process: Callable[[], None] = lambda: None) -> None:
        """Stop planning.

        Args:
            end_process: Ends the planning process: what it was asked is dropped, and is no failure.
        """
        with self._lock:
            self._is_closing = True
        end_process()
        self._planner.shutdown(wait=True, cancel_futures=True)

    def _advance(self, observation: Observation) -> tuple[ControlEvent, ...]:
        """Advance the controller and carry out its commands; with the lock held."""
        before, result = self._state, advance(self._state, observation)
        self._state = result.state
        for command in result.commands:
            self._carry_out(command)
        if self._keep is not None:
            try:
                self._keep(before, observation, result)
            except Exception as error:  # raised where a step is observed: nobody waits for answers
                self._error = self._error or error
        return result.events

    def _carry_out(self, command: Command) -> None:
        match command:
            case WeighPlans():
                self._planner.submit(self._answer, self._weigh, command)
            case FetchPrograms():
                self._planner.submit(self._answer, self._fetch, command)
            case ChangePlan(change, restore) if self._chosen is not None:
                self._put(Morph(change, self._chosen.programs, self._chosen.slots, restore))
            case ProbeLinks():
                self._put(command)
            case DropProbes() if isinstance(self._due, ProbeLinks):
                self._put(None)

    def _put(self, due: Morph | ProbeLinks | None) -> None:
        with self._due_lock:
            self._due = due

    def _answer(self, work: Callable[[Any], Observation], command: Any) -> None:
        """Feed an answer of the planning process back, be it an error."""
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
            except Exception as error:  # nothing can be decided: it is tried again later
                events = self._advance(PlanningFailed(f"{type(error).__name__}: {error}"))
            self._unreported += events

    def _started(self, start: Callable[[], None]) -> Observation:
        start()
        return PlannerStarted()

    def _weigh(self, command: WeighPlans) -> Observation:
        plans = self._asked
        if command.restart:
            plans.restart(self._state.plan, self._programs)
        return PlansWeighed(plans.weigh(command.profile, command.verdicts, command.held))

    def _fetch(self, command: FetchPrograms) -> Observation:
        self._chosen = self._asked.adopt(command.chosen)
        return ProgramsFetched()

    @property
    def _asked(self) -> Plans:
        if self._plans is None:
            raise PlanningError("the run has no planning process")
        return self._plans
