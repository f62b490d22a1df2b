"""Replays a run's decisions from what its controller observed.

A run directory keeps the observations and their outcomes in `control/`, and those of other replicas
in folders beside it. Each file begins with the controller's state, so the oldest can be deleted.
`replay` feeds the observations to the controller again. Under other settings they are valid up to
the first decision that differs; from there `replay` plans itself, and simulates steps with the
measured delays and op times.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from jaxmorph.config.sections import Adaptation
from jaxmorph.control.compute_watch import with_op_ms
from jaxmorph.control.conditions import usual_delay
from jaxmorph.control.controller import advance
from jaxmorph.control.controller_state import (
    Advance,
    AwaitingCandidates,
    CandidateChosen,
    CandidatesReceived,
    ChangePlan,
    Changing,
    ChooseCandidate,
    Command,
    ControllerState,
    DropProbes,
    Observation,
    PlanChanged,
    PlanDropped,
    PlannerStarted,
    Preparing,
    ProbeLinks,
    Probing,
    RequestCandidates,
    RestorePaths,
    Starting,
    StepObserved,
    WithdrawPlan,
    with_settings,
)
from jaxmorph.control.events import ControlEvent
from jaxmorph.control.late_directions import LateDirections
from jaxmorph.control.link_state import Direction, PathFailure, directions_of, link_of
from jaxmorph.control.path_reports import JoinedPathReport
from jaxmorph.control.rank_times import joined_messages, op_times_of, rank_times
from jaxmorph.control.verdicts import latency_ms_of
from jaxmorph.errors import UserError
from jaxmorph.output import write_stderr
from jaxmorph.plain_json import (
    Json,
    ParseError,
    dump,
    dump_apart,
    parse,
    parse_line,
    with_parts,
    with_sum,
)
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.instructions import instructions_text
from jaxmorph.records import Link, Route
from jaxmorph.report.run_directory import ObservationFiles, control_folder
from jaxmorph.runtime.direct_probe import probe_transfers
from jaxmorph.schedule.costs import LinkDelay, StageCosts
from jaxmorph.schedule.timeline import Timeline
from jaxmorph.training.planning_client import Begin, RunToPlan
from jaxmorph.training.planning_process import CandidatePlanner

SEGMENT_STEPS, SEGMENT_BYTES = 200, 16 << 20
"""The length of a file of observations, whichever is reached first."""


@dataclass(frozen=True)
class _Head:
    """The first line of a file."""

    state: ControllerState
    run: RunToPlan


@dataclass(frozen=True)
class _Line:
    """Each further line."""

    observation: Observation
    outcome: Mapping[str, Any]


class ObservationLog:
    """Writes the lines of `control/`, on a replica's rank 0."""

    def __init__(self, files: ObservationFiles, run: RunToPlan) -> None:
        self._files, self._run = files, dump(run)  # once: at 64 stages it takes ten steps
        self._num_steps, self._num_bytes = SEGMENT_STEPS, 0

    def record(self, before: ControllerState, observation: Observation, result: Advance) -> None:
        """Write an observation and its outcome."""
        if self._num_steps >= SEGMENT_STEPS or self._num_bytes >= SEGMENT_BYTES:
            self._num_steps = self._num_bytes = 0
            state, parts = dump_apart(before)
            head = _record(f'{{"state": {state}, "run": {self._run}}}', parts)
            self._write(head, begins=True)
        record = _record(*dump_apart(_Line(observation, _outcome(result))))
        self._num_steps += isinstance(observation, StepObserved)
        self._num_bytes += len(record)
        self._write(record)

    def _write(self, record: bytes, *, begins: bool = False) -> None:
        try:
            self._files.write(record, begins=begins)
        except OSError as error:  # the run doesn't need the file
            why = f"cannot be written: {error.strerror}; the run continues"
            write_stderr(f"error: {error.filename or self._files.folder}: {why}")


def _record(line: str, parts: bytes) -> bytes:
    """A line with its checksum, and the bytes that are stored apart from it."""
    return b"".join((with_sum(line).encode(), b"\n", parts))


def _outcome(result: Advance) -> dict[str, Any]:
    """What followed, in just enough detail to see a difference."""
    return {
        "commands": [_in_brief(command) for command in result.commands],
        "events": [[event.kind, event.link, event.detail] for event in result.events],
    }


def _in_brief(command: Command) -> list[Any]:
    name = type(command).__name__
    match command:
        case RequestCandidates(staying=staying, restart_planner=restart):
            return [name, [*map(str, staying)], restart]
        case ChooseCandidate(chosen):
            return [name, chosen]
        case ProbeLinks(links, restore):
            return [name, [*map(str, links)], sorted(map(str, restore))]
        case ChangePlan(change, restore, late):
            ends = ["{}>{}".format(*each) for each in late]
            return [name, change.reason, sorted(map(str, restore)), *ends]
        case RestorePaths(restore):
            return [name, sorted(map(str, restore))]
        case DropProbes() | WithdrawPlan():
            return [name]


@dataclass(frozen=True)
class Moment:
    """An observation and its outcome in the replay.

    Attributes:
        recorded: Its outcome in the run; None: it is simulated, after the first difference.
        timeline: The simulated step; None: the observed one.
    """

    step: int
    observation: Observation
    result: Advance
    recorded: Mapping[str, Any] | None
    timeline: Timeline | None = None

    @property
    def is_simulated(self) -> bool:
        """Whether the run never observed this."""
        return self.recorded is None

    @property
    def differs(self) -> bool:
        """Whether the outcome in the run was different."""
        return self.recorded is not None and self.recorded != _outcome(self.result)

    @property
    def events(self) -> tuple[ControlEvent, ...]:
        """The events of the replay."""
        return self.result.events

    def differences(self) -> tuple[str, str]:
        """The outcomes in the run and in the replay, as short texts."""
        return _in_words(self.recorded or {}), _in_words(_outcome(self.result))


def replay(run_dir: Path, settings: Adaptation | None = None, replica: int = 0) -> Iterator[Moment]:
    """All observations of a replica's controller that a run directory keeps, in order.

    Args:
        settings: Decide by these; None: by the run's own.

    Raises:
        UserError: The directory keeps none, or one is not valid.
    """
    folder = control_folder(run_dir, replica)
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        got = f"{run_dir}: got no {folder.name}/*.jsonl"
        raise UserError(f"{got}, expected what `train` keeps there")
    simulated, state, recorded = None, None, None
    for file in files:
        lines = _lines(file)
        head = next(lines, None)
        if head is None:  # its writer was killed
            continue
        # Where ranks started again, or lines could not be written, continue from the file's state.
        is_gap = recorded is None or dump(recorded) != dump(head.state)
        recorded = head.state
        if state is None or is_gap:
            simulated = None
            state = recorded if settings is None else with_settings(recorded, settings)
        for line in lines:
            observation = line.observation
            if simulated is None:
                result = advance(state, observation)
                moment = Moment(result.state.step, observation, result, line.outcome)
                yield moment
                state, recorded = moment.result.state, advance(recorded, observation).state
                if moment.differs and settings is not None:
                    simulated = _Simulated(head.run, state)
                    yield from simulated.start()
            elif isinstance(observation, StepObserved):
                recorded = advance(recorded, observation).state
                yield from simulated.step(observation, recorded)
            else:
                recorded = advance(recorded, observation).state


def _lines(file: Path) -> Iterator[Any]:
    """A `_Head`, then each `_Line`."""
    with file.open("rb") as data, suppress(EOFError):  # a killed run's last line may lack a part
        for number in count(1):
            line = data.readline().decode(errors="replace")
            if not line.endswith("\n"):
                return
            where = f"{file}:{number}"
            try:
                values = with_parts(parse_line(Json, line, where), data.read, where)
                parsed = parse(_Head if number == 1 else _Line, values, where)
            except ParseError as error:
                raise UserError(str(error)) from error
            yield parsed


def _in_words(outcome: Mapping[str, Any]) -> str:
    commands = [" ".join(map(str, command)) for command in outcome.get("commands", ())]
    events = [" ".join(filter(None, event)) for event in outcome.get("events", ())]
    return "; ".join([*commands, *events]) or "nothing"


class _Simulated:
    """The run after the first decision that differs."""

    def __init__(self, run: RunToPlan, state: ControllerState) -> None:
        self._state = state = _undecided(state)
        self._commands: list[Command] = []
        config = run.config.model_copy(update={"adaptation": state.settings})
        self._run = replace(run, config=config)
        self._planner = CandidatePlanner(Begin(self._run, state.plan))
        self._programs = self._planner.programs
        self._due: ChangePlan | ProbeLinks | RestorePaths | None = None
        self._probing: tuple[Link, ...] = ()

    def start(self) -> Iterator[Moment]:
        """Report the planner here as started, in place of the run's planning process."""
        yield self._advance(PlannerStarted())
        yield from self._answers()

    def _answers(self) -> Iterator[Moment]:
        """Carry out commands until none are left; planning takes no time here."""
        while self._commands:
            match self._commands.pop(0):
                case RequestCandidates() | ChooseCandidate() as asked:
                    yield self._advance(self._answer(asked))
                case ChangePlan() | ProbeLinks() | RestorePaths() as due:
                    self._due = due
                case DropProbes() if isinstance(self._due, ProbeLinks):
                    self._due = None

    def step(self, fact: StepObserved, recorded: ControllerState) -> Iterator[Moment]:
        """A step of the simulated plan, with the delays and op times that the run measured.

        Args:
            recorded: The state of the run when it observed the step.
        """
        added_ms = _added_ms(fact, recorded)
        links = {link: self._link(link, added_ms) for link in self._state.plan.routes}
        timeline = simulate_blocking(self._programs, _costs(fact, recorded), links)
        probes_ms = {
            str(each): self._message_ms((each.source, each.destination), "direct", added_ms)
            for link in self._probing
            for each in probe_transfers(link)
        }
        due, self._due, self._probing = self._due, None, ()
        paths = self._paths(fact.paths, () if due is None else sorted(due.restore))
        ranks = rank_times(timeline)
        messages = joined_messages(ranks)
        seen = StepObserved(fact.step, op_times_of(ranks), probes_ms, paths, messages)
        yield self._advance(seen, timeline)
        if isinstance(due, ProbeLinks):
            self._probing = due.links
        elif isinstance(due, ChangePlan):
            if self._are_in_time(due.late, added_ms):
                yield self._advance(PlanDropped())
            else:  # ranks swap at the end of this step
                yield self._advance(PlanChanged())
                self._programs = self._planner.programs
        yield from self._answers()

    def _advance(self, observation: Observation, timeline: Timeline | None = None) -> Moment:
        result = advance(self._state, observation)
        self._state = result.state
        self._commands += result.commands
        return Moment(result.state.step, observation, result, None, timeline)

    def _answer(self, asked: RequestCandidates | ChooseCandidate) -> Observation:
        if isinstance(asked, ChooseCandidate):
            self._planner.choose(asked.chosen)
            return CandidateChosen()
        if asked.restart_planner:  # the plan that it has chosen last was dropped
            programs = tuple(map(instructions_text, self._programs))
            self._planner = CandidatePlanner(Begin(self._run, self._state.plan, programs))
        return CandidatesReceived(
            self._planner.make_candidates(asked.profile, asked.verdicts, asked.staying)
        )

    def _link(self, link: Link, added_ms: Mapping[Direction, float]) -> LinkDelay:
        is_failed = link in self._state.paths.unrestored
        route = "delegated" if is_failed else self._state.plan.routes.get(link, "direct")
        return LinkDelay(*(self._message_ms(each, route, added_ms) for each in directions_of(link)))

    def _message_ms(
        self, direction: Direction, route: Route, added_ms: Mapping[Direction, float]
    ) -> float:
        """The usual time of a message on its route, plus the link's delay."""
        usual = usual_delay(self._state.usual, route, link_of(direction))
        return latency_ms_of(usual, direction) + added_ms.get(direction, 0.0)

    def _are_in_time(self, late: LateDirections, added_ms: Mapping[Direction, float]) -> bool:
        """Whether ranks would drop a change, by the times of the whole step."""
        routes = self._state.plan.routes

        def took_ms(direction: Direction) -> float:
            return self._message_ms(direction, routes.get(link_of(direction), "direct"), added_ms)

        return bool(late) and all(took_ms(each) <= calm_ms for each, calm_ms in late.items())

    def _paths(self, report: JoinedPathReport, restored: Sequence[Link]) -> JoinedPathReport:
        """Fail each path that is in use here, if it failed or was found down in the run."""
        failed, routes = self._state.paths.unrestored, self._state.plan.routes
        down = {failure.link: failure for failure in report.failures}
        down |= {
            link: PathFailure(link, "the run found its direct path down")
            for link, is_up in report.up.items()
            if not is_up
        }
        in_use = (link for link in down if routes.get(link, "direct") == "direct")
        failures = tuple(down[link] for link in sorted(in_use) if link not in failed)
        up = {link: link not in down for link in failed}
        return JoinedPathReport(
            failures,
            up,
            restored=tuple(link for link in restored if up.get(link, False)),
        )


def _undecided(state: ControllerState) -> ControllerState:
    """The state for another planning process: without a pending decision, but with its findings."""
    match state.phase:
        case Changing(change):
            dwell = replace(state.dwell, morphed_step=state.step + 1)
            return replace(state, plan=change.plan, phase=Starting(), dwell=dwell)
        case AwaitingCandidates() | Probing() | Preparing() as phase:
            return replace(
                state, findings=state.findings.with_earlier(phase.findings), phase=Starting()
            )
        case _:
            return replace(state, phase=Starting())


def _added_ms(fact: StepObserved, recorded: ControllerState) -> dict[Direction, float]:
    """The delay of each direction in the run: its median time minus the route's usual time."""
    added_ms: dict[Direction, float] = {}
    for direction, samples in fact.by_direction.items():
        route = "direct" if samples.is_direct else "delegated"
        usual = usual_delay(recorded.usual, route, link_of(direction))
        added_ms[direction] = max(0.0, samples.median_ms - latency_ms_of(usual, direction))
    return added_ms


def _costs(fact: StepObserved, recorded: ControllerState) -> StageCosts:
    """The costs of ops in the run's step."""
    costs = recorded.profile.costs
    for (stage, kind), time in fact.ops.items():
        costs = with_op_ms(costs, stage, kind, time.median_ms)
    return costs
