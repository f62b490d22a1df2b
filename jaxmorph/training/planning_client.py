"""The planning process as rank 0 sees it: started, asked, replaced, and ended with the run."""

import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from jaxmorph.config import Config
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.orchestrator import Options
from jaxmorph.control.profiler import Profile
from jaxmorph.control.verdicts import Verdict
from jaxmorph.plain_json import ParseError, dump, parse_line, tagged
from jaxmorph.program.instructions import Channel
from jaxmorph.records import Link
from jaxmorph.schedule.planner import Plan

_ANSWER_S = 60.0
_END_S = 2.0
_Expected = TypeVar("_Expected")


class PlanningError(RuntimeError):
    """The planning process has died, doesn't answer, or could not do what it was asked."""


@dataclass(frozen=True)
class RunToPlan:
    """What the planning process knows of a run; the fields are `CandidatePlanner`'s arguments."""

    config: Config
    num_tied: int
    first: Plan
    profile: Profile
    usual: UsualLinks


@dataclass(frozen=True)
class Begin:
    """The first request: what runs; the answer is `Ready`.

    Attributes:
        programs: Every rank's instructions, as `program_text` writes them; None: the plan's own.
    """

    run: RunToPlan
    in_force: Plan
    programs: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Weigh:
    """Asks for the plans that there are (`CandidatePlanner.weigh`); the answer is `Options`."""

    profile: Profile
    verdicts: tuple[Verdict, ...]
    held: tuple[Link, ...]


@dataclass(frozen=True)
class Adopt:
    """Takes one of the last options for the plan in force; the answer is `Chosen`."""

    chosen: int


@dataclass(frozen=True)
class Ready:
    """It can plan."""


@dataclass(frozen=True)
class Chosen:
    """What a candidate becomes on the ranks.

    Attributes:
        programs: Every rank's instructions, as `program_text` writes them.
        slots: How many slots each delegated channel needs.
    """

    programs: tuple[str, ...]
    slots: dict[Channel, int]


@dataclass(frozen=True)
class Failed:
    """Why a request could not be answered."""

    error: str


Request: TypeAlias = Begin | Weigh | Adopt
Answer: TypeAlias = Ready | Options | Chosen | Failed


class PlanningProcess:
    """Asks the process that plans beside training; nobody else's time is used meanwhile.

    It may be started long before it is first asked. One thread asks at a time.
    """

    def __init__(self) -> None:
        self._process = _started()
        self._run: RunToPlan | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def begin(self, run: RunToPlan, in_force: Plan | None = None) -> None:
        """Tell it what runs; without `in_force` the first plan.

        Raises:
            PlanningError: If it can't plan.
        """
        self._run = run
        self._tell_what_runs(in_force or run.first, None)

    def restart(self, in_force: Plan, programs: tuple[str, ...] | None = None) -> None:
        """Start another process in place of this one, and tell it what runs.

        Args:
            programs: What ranks run of it, as they were told last, each as `program_text` writes
                it; None: what they began with.

        Raises:
            PlanningError: If it can't plan, or has been closed.
        """
        with self._lock:
            if self._is_closed:
                raise PlanningError("the planning process has been closed")
            self._end_process()
            self._process = _started()
        self._tell_what_runs(in_force, programs)

    def weigh(
        self, profile: Profile, verdicts: Sequence[Verdict], held: Iterable[Link] = ()
    ) -> Options:
        """The plans that there are for what ops and links cost now (`CandidatePlanner.weigh`).

        Raises:
            PlanningError: If it can't plan.
        """
        return self._ask(Weigh(profile, tuple(verdicts), tuple(held)), Options)

    def adopt(self, chosen: int) -> Chosen:
        """Have it take one of the last options for the plan in force.

        Raises:
            PlanningError: If it can't.
        """
        return self._ask(Adopt(chosen), Chosen)

    def end(self) -> int:
        """Let it end by itself, as it does when nobody is left to ask it; its exit code."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        return self._process.wait(_ANSWER_S)

    def close(self) -> None:
        """End it for good; what it does now is no longer wanted."""
        with self._lock:
            self._is_closed = True
            self._end_process()

    def _tell_what_runs(self, in_force: Plan, programs: tuple[str, ...] | None) -> None:
        if self._run is None:
            raise PlanningError("the planning process was restarted before it had begun")
        self._ask(Begin(self._run, in_force, programs), Ready)

    def _end_process(self) -> None:
        self._process.kill()
        self._process.wait(_END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # it may have died with a request that it never read
                    pipe.close()

    def _ask(self, request: Request, expected: type[_Expected]) -> _Expected:
        requests, answers = self._process.stdin, self._process.stdout
        if requests is None or answers is None:
            raise PlanningError("the planning process has no pipes")
        overdue = threading.Timer(_ANSWER_S, self._process.kill)
        overdue.start()
        try:
            requests.write(dump(tagged(request)) + "\n")
            requests.flush()
            line = answers.readline()
        except (OSError, ValueError) as error:  # ValueError: its pipes have been closed
            raise PlanningError(f"the planning process is gone: {error}") from error
        finally:
            overdue.cancel()
        if not line:
            raise PlanningError("the planning process has died, or took too long")
        try:
            answer: Answer = parse_line(Answer, line, "the planning process's answer")
        except ParseError as error:
            raise PlanningError(str(error)) from error
        if isinstance(answer, expected):
            return answer
        raise PlanningError(answer.error if isinstance(answer, Failed) else f"got {answer!r}")


def _started() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "jaxmorph.training.planning_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
