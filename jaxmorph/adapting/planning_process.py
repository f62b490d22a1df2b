"""Plans beside training: a process that rank 0 starts and asks.

`python -m jaxmorph.adapting.planning_process`.
A request is a line of JSON on standard input, its answer one on standard output:

- `begin`: `config`, `num_tied`, `first`, `profile`, `usual`, `in_force` and `programs`, as
  `CandidatePlanner` takes them, programs as texts.
- `weigh`: `profile`, `verdicts` and `held`; the answer is `Weighed`, each candidate as `plan`,
  `step_ms`, and programs as texts.
- `adopt`: `chosen`, the number of a candidate; the answer is `programs`, each a text, and `slots`.

An answer that is `{"error": ...}` says what went wrong. The process imports no JAX, leaves the
processors to training, and ends when its standard input does, and so with the process that has
started it.
"""

import os

if __name__ == "__main__":
    os.nice(5)  # before all imports; with more of it, on a busy machine plans come steps too late

import json
import sys
from collections.abc import Iterator
from typing import IO

from jaxmorph.adapting.plan_candidates import Candidate, CandidatePlanner
from jaxmorph.config import check_config
from jaxmorph.control.conditions import usual_from_json
from jaxmorph.control.profiler import Profile
from jaxmorph.control.verdicts import Verdict
from jaxmorph.program.program_text import parse_program, program_text
from jaxmorph.records import Message
from jaxmorph.schedule.costs import Link
from jaxmorph.schedule.planner import Plan


class Answering:
    """Answers requests, one after another."""

    def __init__(self) -> None:
        self._planner: CandidatePlanner | None = None
        self._candidates: tuple[Candidate, ...] = ()

    def answer(self, request: Message) -> Message:
        """The answer to a request; a mistake in it is answered too."""
        try:
            return self._answer(request)
        except Exception as error:  # training goes on without it, and tells why
            return {"error": f"{type(error).__name__}: {error}"}

    def _answer(self, request: Message) -> Message:
        match request:
            case {"kind": "begin"}:
                return self._begin(request)
            case {"kind": "weigh", "profile": profile, "verdicts": verdicts, "held": held}:
                return self._weigh(profile, verdicts, held)
            case {"kind": "adopt", "chosen": chosen}:
                return self._adopt(self._candidates[chosen])
        raise ValueError(f"a request of no known kind: {request.get('kind')}")

    def _begin(self, request: Message) -> Message:
        told = request["programs"]
        self._planner = CandidatePlanner(
            check_config(request["config"]),
            request["num_tied"],
            Plan.from_json(request["first"]),
            Profile.from_json(request["profile"]),
            usual_from_json(request["usual"]),
            Plan.from_json(request["in_force"]),
            None if told is None else tuple(map(parse_program, told)),
        )
        return {}

    def _weigh(self, profile: Message, verdicts: list[Message], held: list[str]) -> Message:
        judged = [Verdict.from_json(verdict) for verdict in verdicts]
        links = [Link.parse(name) for name in held]
        weighed = self._begun.weigh(Profile.from_json(profile), judged, links)
        self._candidates = weighed.candidates
        return {
            "in_force_ms": weighed.in_force_ms,
            "undisturbed_ms": weighed.undisturbed_ms,
            "candidates": [
                {"plan": each.plan.to_json(), "step_ms": each.step_ms}
                for each in weighed.candidates
            ],
        }

    def _adopt(self, candidate: Candidate) -> Message:
        slots = self._begun.adopt(candidate)
        return {
            "programs": [program_text(program) for program in candidate.programs],
            "slots": [[*channel, number] for channel, number in slots.items()],
        }

    @property
    def _begun(self) -> CandidatePlanner:
        if self._planner is None:
            raise ValueError("asked before it was told what runs")
        return self._planner


def serve(requests: Iterator[str], answers: IO[str]) -> None:
    """Answer requests until there are no more.

    Args:
        answers: Where to write.
    """
    answering = Answering()
    for line in requests:
        answers.write(json.dumps(answering.answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(iter(sys.stdin), sys.stdout)
