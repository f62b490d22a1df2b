"""The planning process as rank 0 sees it: started, asked, replaced, and ended with the run."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jaxmorph.config import Config
from jaxmorph.control.conditions import UsualLinks, usual_to_json
from jaxmorph.control.orchestrator import Option, Options
from jaxmorph.control.profiler import Profile
from jaxmorph.control.verdicts import Verdict
from jaxmorph.plain_json import Json
from jaxmorph.program.instructions import Channel, Payload
from jaxmorph.records import Link
from jaxmorph.schedule.planner import Plan

_ANSWER_S = 60.0
_END_S = 2.0


class PlanningError(RuntimeError):
    """The planning process has died, doesn't answer, or could not do what it was asked."""


@dataclass(frozen=True)
class Chosen:
    """What a candidate becomes on the ranks.

    Attributes:
        programs: Every rank's instructions, as `program_text` writes them.
        slots: How many slots each delegated channel needs.
    """

    programs: tuple[str, ...]
    slots: dict[Channel, int]


class PlanningProcess:
    """Asks the process that plans beside training; nobody else's time is used meanwhile.

    It may be started long before it is first asked. One thread asks at a time.
    """

    def __init__(self) -> None:
        self._process = _started()
        self._begun_with: Json = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def begin(
        self,
        config: Config,
        num_tied: int,
        first: Plan,
        profile: Profile,
        usual: UsualLinks,
        in_force: Plan | None = None,
    ) -> None:
        """Tell it what runs: the arguments are `CandidatePlanner`'s.

        Raises:
            PlanningError: If it can't plan.
        """
        self._begun_with = run_to_plan(config, num_tied, first, profile, usual)
        self._tell_what_runs(in_force or first, None)

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
        answer = self._ask(
            kind="weigh",
            profile=profile.to_json(),
            verdicts=[verdict.to_json() for verdict in verdicts],
            held=[str(link) for link in held],
        )
        options = (Option(Plan.from_json(o["plan"]), o["step_ms"]) for o in answer["candidates"])
        return Options(answer["in_force_ms"], answer["undisturbed_ms"], tuple(options))

    def adopt(self, chosen: int) -> Chosen:
        """Have it take one of the last options for the plan in force.

        Raises:
            PlanningError: If it can't.
        """
        answer = self._ask(kind="adopt", chosen=chosen)
        return Chosen(tuple(answer["programs"]), slots_from_json(answer["slots"]))

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
        now = {"in_force": in_force.to_json(), "programs": programs}
        self._ask(kind="begin", **self._begun_with, **now)

    def _end_process(self) -> None:
        self._process.kill()
        self._process.wait(_END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # it may have died with a request that it never read
                    pipe.close()

    def _ask(self, **request: Any) -> Json:
        requests, answers = self._process.stdin, self._process.stdout
        if requests is None or answers is None:
            raise PlanningError("the planning process has no pipes")
        overdue = threading.Timer(_ANSWER_S, self._process.kill)
        overdue.start()
        try:
            requests.write(json.dumps(request) + "\n")
            requests.flush()
            line = answers.readline()
        except (OSError, ValueError) as error:  # ValueError: its pipes have been closed
            raise PlanningError(f"the planning process is gone: {error}") from error
        finally:
            overdue.cancel()
        if not line:
            raise PlanningError("the planning process has died, or took too long")
        answer = json.loads(line)
        if "error" in answer:
            raise PlanningError(answer["error"])
        return answer


def _started() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "jaxmorph.training.planning_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def run_to_plan(
    config: Config, num_tied: int, first: Plan, profile: Profile, usual: UsualLinks
) -> Json:
    """What the planning process is to know of a run; the arguments are `CandidatePlanner`'s."""
    return {
        "config": config.model_dump(mode="json"),
        "num_tied": num_tied,
        "first": first.to_json(),
        "profile": profile.to_json(),
        "usual": usual_to_json(usual),
    }


def slots_from_json(data: list[list[Any]]) -> dict[Channel, int]:
    """Slots by channel, from lists of a channel's fields and its number."""
    return {
        Channel(Payload(payload), source, destination, index): number
        for payload, source, destination, index, number in data
    }
