"""Rank 0's client of the planning process, and the messages between the two."""

import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from jaxmorph.config import Config
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.controller_state import RequestCandidates
from jaxmorph.control.orchestrator import Options
from jaxmorph.control.profiler import Profile
from jaxmorph.control.rank_times import texts_of
from jaxmorph.control.verdicts import Verdict
from jaxmorph.plain_json import ParseError, dump, parse_line, tagged
from jaxmorph.program.instructions import Channel
from jaxmorph.program.slots_needed import HostRoom
from jaxmorph.records import Link
from jaxmorph.schedule.planner import Plan
from jaxmorph.schedule.timeline import Timeline

_ANSWER_S = 60.0
_END_S = 2.0
_Expected = TypeVar("_Expected")


class PlanningError(RuntimeError):
    """The planning process has died, does not answer, or could not serve a request."""


@dataclass(frozen=True)
class RunToPlan:
    """What the planning process knows of a run.

    Attributes:
        num_tied: How many tied parameters the first and the last stage hold copies of.
        home: The plan for healthy links.
        profile: The costs that it was made for.
        usual: Delays of healthy links on either route.
        room: The ranks' host memory for slots and stashes; None: no limit.
    """

    config: Config
    num_tied: int
    home: Plan
    profile: Profile
    usual: UsualLinks
    room: HostRoom | None = None


@dataclass(frozen=True)
class Begin:
    """The first request: the run and its plan in force; the answer is `Ready`.

    Attributes:
        programs: The instructions that ranks run, as `instructions_text` writes them: a plan
            doesn't say which costs it was last lowered for. None: lower it for the run's profile.
        number: The plan's number, for `Simulate`.
    """

    run: RunToPlan
    in_force: Plan
    programs: tuple[str, ...] | None = None
    number: int = 0


@dataclass(frozen=True)
class Choose:
    """Makes one of the last options the plan in force; the answer is `Chosen`.

    Attributes:
        number: The plan's number from now on, for `Simulate`.
    """

    chosen: int
    number: int


@dataclass(frozen=True)
class Simulate:
    """Simulates a step of one of the last plans in force; the answer is `Simulated`.

    Attributes:
        with_times: Whether the answer has all times.
    """

    number: int
    profile: Profile
    with_times: bool = False


@dataclass(frozen=True)
class Ready:
    """The process knows the run and can plan."""


@dataclass(frozen=True)
class Chosen:
    """A chosen plan as ranks run it.

    Attributes:
        programs: Every rank's instructions, as `instructions_text` writes them.
        slots: The number of slots of each delegated channel.
        scarce: The slots of channels whose sends may wait for one.
    """

    programs: tuple[str, ...]
    slots: dict[Channel, int]
    scarce: dict[Channel, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Simulated:
    """A simulated step.

    Attributes:
        bubble_rate: The idle share of the devices' time; None: only the step's time is known.
        times: The JSON of each rank's `RankTimes`, if it was asked for.
    """

    step_ms: float
    bubble_rate: float | None = None
    times: tuple[str, ...] = ()

    @classmethod
    def of(cls, timeline: Timeline, *, with_times: bool = False) -> "Simulated":
        """The outcome of a simulation."""
        times = texts_of(timeline) if with_times else ()
        return cls(timeline.makespan_ms, timeline.bubble_rate, times)


@dataclass(frozen=True)
class Failed:
    """The request failed."""

    error: str


# `Options` answers `RequestCandidates`, whose `restart_planner` is for the caller to carry out.
Request: TypeAlias = Begin | RequestCandidates | Choose | Simulate
Answer: TypeAlias = Ready | Options | Chosen | Simulated | Failed


class PlanningProcess:
    """A process that plans beside training, and the requests to it.

    It may start long before its first request. One thread makes requests at a time.

    Attributes:
        has_died: Whether the last request got no valid answer.
    """

    def __init__(self) -> None:
        self._process = _start()
        self._run: RunToPlan | None = None
        self._is_closed = self.has_died = False
        self._lock = threading.Lock()

    def begin(self, run: RunToPlan, in_force: Plan) -> None:
        """Send the run and its plan in force.

        Raises:
            PlanningError: It can't plan.
        """
        self._run = run
        self._begin(in_force, None, 0)

    def restart(
        self, in_force: Plan, programs: tuple[str, ...] | None = None, number: int = 0
    ) -> None:
        """Send the run again, to another process if this one has died.

        Args:
            programs: The instructions that ranks run, as `instructions_text` writes them. None:
                those that they began with.
            number: The plan's number, for `simulate`.

        Raises:
            PlanningError: It can't plan, or has been closed.
        """
        with self._lock:
            if self._is_closed:
                raise PlanningError("the planning process has been closed")
            if self.has_died:
                self._kill()
                self._process = _start()
        self._begin(in_force, programs, number)

    def make_candidates(
        self, profile: Profile, verdicts: Sequence[Verdict], staying: Iterable[Link] = ()
    ) -> Options:
        """The candidates under the current costs (`CandidatePlanner.make_candidates`).

        Raises:
            PlanningError: It can't plan.
        """
        return self._ask(RequestCandidates(profile, tuple(verdicts), tuple(staying)), Options)

    def choose(self, chosen: int, number: int) -> Chosen:
        """Make one of the last options the plan in force, with a number for `simulate`.

        Raises:
            PlanningError: The process can't.
        """
        return self._ask(Choose(chosen, number), Chosen)

    def simulate(self, number: int, profile: Profile, *, with_times: bool = False) -> Simulated:
        """Simulate a step of one of the last plans in force.

        Raises:
            PlanningError: The process can't.
        """
        return self._ask(Simulate(number, profile, with_times), Simulated)

    def close(self) -> None:
        """Kill the process for good."""
        with self._lock:
            self._is_closed = True
            self._kill()

    def _begin(self, in_force: Plan, programs: tuple[str, ...] | None, number: int) -> None:
        if self._run is None:
            raise PlanningError("the planning process was restarted before it had begun")
        self._ask(Begin(self._run, in_force, programs, number), Ready)

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait(_END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # flushes a request that a dead process never read
                    pipe.close()

    def _ask(self, request: Request, expected: type[_Expected]) -> _Expected:
        self.has_died = True
        answer = self._answer_of(request)
        self.has_died = not isinstance(answer, expected | Failed)
        if isinstance(answer, expected):
            return answer
        raise PlanningError(answer.error if isinstance(answer, Failed) else f"got {answer!r}")

    def _answer_of(self, request: Request) -> Answer:
        requests, answers = self._process.stdin, self._process.stdout
        if requests is None or answers is None:
            raise PlanningError("the planning process has no pipes")
        # A pipe has no timeout: killing the process ends `readline`.
        overdue = threading.Timer(_ANSWER_S, self._process.kill)
        overdue.start()
        try:
            requests.write(dump(tagged(request)) + "\n")
            requests.flush()
            line = answers.readline()
        except (OSError, ValueError) as error:  # ValueError: the pipes are closed
            raise PlanningError(f"the planning process is gone: {error}") from error
        finally:
            overdue.cancel()
        if not line:
            raise PlanningError("the planning process has died, or took too long")
        try:
            return parse_line(Answer, line, "the planning process's answer")
        except ParseError as error:
            raise PlanningError(str(error)) from error


def _start() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "jaxmorph.training.planning_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
