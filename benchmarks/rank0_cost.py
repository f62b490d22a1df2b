"""What a step costs rank 0's own process beside training: `python -m benchmarks.rank0_cost`.

Rank 0 collects what all ranks measured, judges links, and records the step, in the process that
also trains a stage: what that takes of the processor slows this stage down. Here all of it is
real (the loop, the exchange over sockets, the recorder, the controller, the planning process), but
stages compute nothing: they return the simulated times of a step, with noise. The other ranks are
threads of a second process. One link turns slow once, and all ranks change to another plan.

Seconds of processor time of rank 0's process, all threads together; exit code 1 if they exceed
2 % of a step of one second.
"""

import argparse
import multiprocessing
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from benchmarks.results import provenance, write_json
from jaxmorph.compare.provenance import load_averages
from jaxmorph.config import Config
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.controller_state import first_state
from jaxmorph.control.detector import Detector
from jaxmorph.control.orchestrator import Option, Options
from jaxmorph.control.profiler import Profile, Profiler
from jaxmorph.control.step_programs import lower_step
from jaxmorph.messages import EventEmitted
from jaxmorph.placement import Placement
from jaxmorph.plain_json import dump, tagged
from jaxmorph.program.blocking import Disturbance, simulate_blocking
from jaxmorph.program.instructions import RankInstructions, Transfer, instructions_text
from jaxmorph.program.slots_needed import slots_needed
from jaxmorph.records import Link
from jaxmorph.report.run_directory import ObservationFiles, RunLines, control_folder
from jaxmorph.runtime.executor import StepInputs, StepOutcome
from jaxmorph.runtime.queue import Stamp
from jaxmorph.runtime.rendezvous import HostRendezvous
from jaxmorph.runtime.step import StepRunner
from jaxmorph.schedule.costs import LinkDelay, StageCosts
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.planner import Plan
from jaxmorph.schedule.timeline import Timeline
from jaxmorph.training.adaptation import Adaptation
from jaxmorph.training.callbacks import Recording
from jaxmorph.training.control_loop import ControlLoop
from jaxmorph.training.evaluation import NOT_EVALUATED
from jaxmorph.training.loop import Loop
from jaxmorph.training.plan_in_force import PlanInForce, plan_step
from jaxmorph.training.planning_client import (
    Chosen,
    PlanningProcess,
    RunToPlan,
    Simulated,
)
from jaxmorph.training.replay import ObservationLog
from jaxmorph.training.step_recorder import StepRecorder

STEP_S, SHARE = 1.0, 0.02
_DEADLINE_S = 120.0
_NEVER = 1000  # steps until the last one, which would leave its timelines
_MADE = 3  # different steps, which come in turn
_WATCHED_STEPS = 20  # after the steady ones, for the parts
_CHANGE_STEPS = 8  # from the delay until the change is over
_SLOW_MS = 200.0
_INPUTS = StepInputs(None, None, 1.0)

_PARTS = (  # what is timed as which part; of nested ones the inner counts
    ("jaxmorph.runtime.step", "StepTimings.of_step", "its own report"),
    ("jaxmorph.runtime.rendezvous", "HostRendezvous._exchange", "exchange"),
    ("jaxmorph.runtime.report", "StepReport.from_json", "parse"),
    ("jaxmorph.runtime.report", "StepTimings.of_detail", "parse"),
    ("jaxmorph.training.step_recorder", "step_observed", "merge"),
    ("jaxmorph.control.controller_state", "by_direction", "merge"),
    ("jaxmorph.control.profiler", "Profiler.add", "profile"),
    ("jaxmorph.control.profiler", "Profiler.profile", "profile"),
    ("jaxmorph.training.control_loop", "ControlLoop.observe", "detect"),
    ("jaxmorph.training.replay", "ObservationLog.record", "observation log"),
    ("jaxmorph.training.plan_in_force", "PlanInForce.simulate", "simulate"),
    ("jaxmorph.training.planning_client", "PlanningProcess._ask", "simulate"),
    ("jaxmorph.training.adaptation", "Adaptation.report", "plan exchange"),
    ("jaxmorph.training.adaptation", "Adaptation.after", "plan exchange"),
    ("jaxmorph.training.step_recorder", "StepRecorder._switch_plan", "plan exchange"),
    ("jaxmorph.training.step_recorder", "StepRecorder._write", "record"),
    ("jaxmorph.training.step_recorder", "StepRecorder._send_step", "record"),
    ("jaxmorph.training.step_recorder", "StepRecorder._send_link_events", "record"),
    ("jaxmorph.training.step_recorder", "TracedSteps.record", "record"),
)


class Clock:
    """Adds up the processor time of parts; a part's time leaves out that of parts inside it."""

    def __init__(self) -> None:
        self.took_s: defaultdict[str, float] = defaultdict(float)
        self._inside = threading.local()

    def timed(self, work: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The same function, timed."""

        def run(*arguments: Any, **named: Any) -> Any:
            outer_s = getattr(self._inside, "took_s", 0.0)
            self._inside.took_s, began_s = 0.0, time.thread_time()
            try:
                return work(*arguments, **named)
            finally:
                whole_s = time.thread_time() - began_s
                self.took_s[part] += whole_s - self._inside.took_s
                self._inside.took_s = outer_s + whole_s

        return run

    def watch(self) -> None:
        """Time all parts from now on, in this process.

        The clock itself takes time, so no step that is judged is watched.
        """
        for module, path, part in _PARTS:
            *owner, name = path.split(".")
            target = import_module(module)
            for each in owner:
                target = getattr(target, each)
            found = vars(target)[name]
            if isinstance(found, classmethod):
                setattr(target, name, classmethod(self.timed(found.__func__, part)))
            else:
                setattr(target, name, self.timed(found, part))


class Noise(Disturbance):
    """Ops and messages take up to 5 % longer, and those of a slow link another delay."""

    def __init__(self, seed: int, slow: Link | None = None) -> None:
        self._random, self._slow = random.Random(seed), slow
        self._of_transfer: dict[Transfer, float] = {}

    def op_ms(self, rank: int, op: Op, planned_ms: float) -> float:
        """An op's duration."""
        return planned_ms * (1 + 0.05 * self._random.random())

    def message_ms(self, transfer: Transfer, begins_ms: float, planned_ms: float) -> float:
        """A message's duration, the same for both ends."""
        if transfer not in self._of_transfer:
            slow_ms = _SLOW_MS if transfer.link == self._slow else 0.0
            self._of_transfer[transfer] = planned_ms * (1 + 0.05 * self._random.random()) + slow_ms
        return self._of_transfer[transfer]


@dataclass(frozen=True)
class Case:
    """A run to measure, as all its processes know it before they part.

    Attributes:
        plans: The first plan, and the one that delegates the slow link.
        healthy, slow: The outcomes of steps under the first plan, of all ranks.
    """

    config: Config
    profile: Profile
    plans: tuple[Plan, Plan]
    programs: tuple[tuple[RankInstructions, ...], ...]
    healthy: tuple[tuple[StepOutcome, ...], ...]
    slow: tuple[StepOutcome, ...]
    steady_steps: int

    @property
    def slow_from(self) -> int:
        """The first step with a slow link."""
        return self.steady_steps + _WATCHED_STEPS

    @property
    def num_steps(self) -> int:
        """Steady ones, those whose parts are timed, and those of the change."""
        return self.slow_from + _CHANGE_STEPS

    def outcome(self, step: int, rank: int) -> StepOutcome:
        """What a rank's stage returns, as if it had just run."""
        of_ranks = self.slow if step >= self.slow_from else self.healthy[step % _MADE]
        return of_ranks[rank]


def make_case(stages: int, microbatches: int, steady_steps: int) -> Case:
    """ZB-H2 with ops that make a step of a second, all links direct; then one link delegated."""
    config = Config.model_validate({
        "run": {"steps": steady_steps + _WATCHED_STEPS + _CHANGE_STEPS + _NEVER},
        "parallelism": {"stages": stages},
        "batch": {"microbatches": microbatches},
        "schedule": {"name": "zb-h2"},
        "adaptation": {"enabled": True},
    })  # fmt: skip
    op_ms = 1e3 * STEP_S / (3 * (microbatches + stages))
    costs = StageCosts.uniform(stages, op_ms, op_ms, op_ms)
    links = dict.fromkeys(Placement(stages).links, LinkDelay(0.1, 0.1))
    profile = Profile(costs, links)
    first = plan_step(config, profile)
    slow = Link(stages // 2 - 1, stages // 2)
    plans = first, replace(first, routes={**first.routes, slow: "delegated"})
    programs = tuple(lower_step(each.schedule, profile, each.routes) for each in plans)
    simulated = partial(simulate_blocking, programs[0], costs, links)
    healthy = tuple(outcomes(simulated(Noise(seed))) for seed in range(_MADE))
    late = outcomes(simulated(Noise(_MADE, slow)))
    return Case(config, profile, plans, programs, healthy, late, steady_steps)


def outcomes(timeline: Timeline) -> tuple[StepOutcome, ...]:
    """What each rank's stage would return of a simulated step, in seconds from 0."""
    of_rank: list[tuple[list[Stamp], list[Stamp]]] = [([], []) for _ in timeline.orders]
    for span in timeline.spans():
        of_rank[span.stage][0].append(Stamp(span.op, span.start_ms / 1e3, span.end_ms / 1e3))
    for each in timeline.transfers:
        stamp = Stamp(Transfer.parse(each.label), each.start_ms / 1e3, each.end_ms / 1e3)
        of_rank[each.stage][0 if each.holds_queue else 1].append(stamp)
    in_order = (sorted(stamps, key=lambda stamp: stamp.end_s) for stamps, _ in of_rank)
    return tuple(
        StepOutcome(0.0, (), stamps, arrivals)
        for stamps, (_, arrivals) in zip(in_order, of_rank, strict=True)
    )


class Stage:
    """Stands in for a rank's `StageTrainer`: computes nothing and returns simulated times.

    Attributes:
        took_s: Processor time of that itself, which counts for nothing.
    """

    device = SimpleNamespace(memory_stats=dict)
    delegated = None

    def __init__(self, case: Case, rank: int) -> None:
        self._case, self._rank = case, rank
        self.took_s = 0.0

    def run(self, program: RankInstructions, inputs: StepInputs, step: int) -> StepOutcome:
        """The outcome of a step that begins now."""
        began_s = time.thread_time()
        outcome, now_s = self._case.outcome(step, self._rank), time.monotonic()
        moved = [
            [Stamp(each.label, each.start_s + now_s, each.end_s + now_s) for each in stamps]
            for stamps in (outcome.stamps, outcome.arrivals)
        ]
        self.took_s += time.thread_time() - began_s
        return replace(outcome, stamps=moved[0], arrivals=moved[1])

    def squared_norm(self) -> float:
        """Of no gradients."""
        return 1.0

    def nothing(self, *arguments: Any, **named: Any) -> Any:
        """Takes the place of all that has no effect here."""
        return ()

    events = take_link_failures = update = add_slots = free_slots = probe = nothing
    message_times_ms = nothing


class PreparedPlans(PlanningProcess):
    """A planning process that needs no time to plan: the other plan is there already."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case = case
        programs = case.programs[1]
        self._answer = Chosen(tuple(map(instructions_text, programs)), slots_needed(programs))

    def make_candidates(self, profile: Any, verdicts: Any, staying: Any = ()) -> Options:
        """The plan that delegates the slow link takes half as long."""
        options = (Option(plan, 1e3 / (1 + at)) for at, plan in enumerate(self._case.plans))
        return Options(2e3, 1e3, tuple(options))

    def choose(self, chosen: int, number: int) -> Chosen:
        """All ranks' instructions."""
        return self._answer

    def simulate(self, number: int, profile: Profile, *, with_times: bool = False) -> Simulated:
        """A step of the first plan, the only one that the process knows."""
        return super().simulate(0, profile, with_times=with_times)


class Store:
    """Passes on where rank 0 listens."""

    def __init__(self) -> None:
        self._values = multiprocessing.get_context("fork").Queue()

    def key_value_set(self, key: str, value: str) -> None:
        """Store the only value."""
        self._values.put(value)

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Take it, and store it again for the others."""
        value = self._values.get(timeout=timeout_in_ms / 1e3)
        self._values.put(value)
        return value


def run_other_ranks(case: Case, store: Store, report: Any) -> None:
    """All ranks but rank 0, each in a thread; sends the processor time that each step took one."""
    took_s: list[float] = []

    def run(rank: int) -> None:
        own = join(case, store, rank)
        stage: Any = Stage(case, rank)
        nothing: Any = None
        adaptation = Adaptation(own, stage, nothing, None, None)
        loop = Loop(StepRunner(stage, own), case.programs[0][rank], [adaptation])
        began_s = time.thread_time()
        for _ in range(case.num_steps):
            loop.step(_INPUTS)
        took_s.append((time.thread_time() - began_s - stage.took_s) / case.num_steps)
        own.exchange({})  # rank 0 has recorded all

    ranks = [threading.Thread(target=run, args=[each]) for each in range(1, len(case.healthy[0]))]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    report.send(median(took_s))


def join(case: Case, store: Store, rank: int) -> HostRendezvous:
    """A rank's end of the rendezvous."""
    stages = case.config.parallelism.stages
    own = HostRendezvous(store, "127.0.0.1", rank, stages, _DEADLINE_S, bytes(32))
    own.exchange({})
    own.limit(_DEADLINE_S)  # all have started
    return own


@dataclass
class Measured:
    """The processor time of rank 0's process, seconds, by step."""

    steady_s: list[float] = field(default_factory=list)
    change_s: list[float] = field(default_factory=list)
    parts_s: dict[str, float] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    other_rank_s: float = 0.0
    kept_bytes: int = 0


def measure(case: Case) -> Measured:
    """Rank 0's run, and the others' beside it."""
    forking, found, clock = multiprocessing.get_context("fork"), Measured(), Clock()
    store, (ours, theirs) = Store(), forking.Pipe(duplex=False)
    others = forking.Process(target=run_other_ranks, args=(case, store, theirs), daemon=True)
    others.start()
    with ExitStack() as opened:
        own = opened.enter_context(closing(join(case, store, 0)))
        loop, recorder, stage = opened.enter_context(opened_rank_0(case, own, found))
        for number in range(case.num_steps):
            if number == case.steady_steps:
                clock.watch()
            if number == case.slow_from:
                found.parts_s = {
                    name: took_s / _WATCHED_STEPS for name, took_s in clock.took_s.items()
                }
            began_s = time.process_time() - stage.took_s
            loop.step(_INPUTS)
            recorder.on_disk().result(_DEADLINE_S)
            took_s = time.process_time() - stage.took_s - began_s
            if number < case.steady_steps:
                found.steady_s.append(took_s)
            elif number >= case.slow_from:
                found.change_s.append(took_s)
        own.exchange({})
        found.other_rank_s = ours.recv()
    others.join(_DEADLINE_S)
    return found


@contextmanager
def opened_rank_0(
    case: Case, own: HostRendezvous, found: Measured
) -> Iterator[tuple[Loop, StepRecorder, Stage]]:
    """Rank 0's loop, recorder and stage, as `training.run` opens them."""
    config = case.config
    stage: Any = Stage(case, 0)
    plan, profile = case.plans[0], case.profile
    usual: UsualLinks = {"direct": profile.links, "delegated": profile.links}
    state = first_state(config.adaptation, plan, profile, usual, Detector())

    def send(message: Any) -> None:
        dump(tagged(message))  # as `LauncherLink.send` writes it
        if isinstance(message, EventEmitted):
            found.events.append(message.event.kind)

    class Counted(ObservationFiles):
        def write(self, record: bytes, *, begins: bool) -> None:
            found.kept_bytes += len(record)
            super().write(record, begins=begins)

    with ExitStack() as opened:
        folder = Path(opened.enter_context(TemporaryDirectory()))
        lines = opened.enter_context(closing(RunLines(folder)))
        plans = opened.enter_context(closing(PreparedPlans(case)))
        run = RunToPlan(config, 0, plan, profile, usual)
        log = ObservationLog(Counted(control_folder(folder, 0)), run)
        control = ControlLoop(state, plans, lambda *seen: log.record(*seen))  # it may be watched
        control.start(partial(plans.begin, run, plan))
        opened.callback(lambda: control.close(plans.close))
        in_force = PlanInForce(plan, case.programs[0], 0)
        recorder = opened.enter_context(
            StepRecorder(
                config,
                in_force,
                Profiler(config.parallelism.stages),
                send,
                active=True,
                loop=control,
                lines=lines,
            )
        )
        evaluation: Any = SimpleNamespace(latest=NOT_EVALUATED)
        recording = Recording(recorder, evaluation, plan)
        adaptation = Adaptation(own, stage, recording, control, None)
        runner = StepRunner(stage, own)
        control._planner.submit(lambda: None).result(_DEADLINE_S)  # the process has begun
        yield Loop(runner, in_force.program, [recording, adaptation]), recorder, stage


def result_of(case: Case, found: Measured) -> dict[str, Any]:
    """All figures."""
    first_s, *steady_s = found.steady_s  # in the first, every message is read by itself
    return {
        "stages": case.config.parallelism.stages,
        "microbatches": case.config.batch.microbatches,
        "steps": case.steady_steps,
        "bar_ms": 1e3 * SHARE * STEP_S,
        "first_ms": 1e3 * first_s,
        "mean_ms": 1e3 * sum(steady_s) / len(steady_s),
        "median_ms": 1e3 * median(steady_s),
        "parts_ms": {name: 1e3 * took_s for name, took_s in sorted(found.parts_s.items())},
        "change_ms": [1e3 * took_s for took_s in found.change_s],
        "events": found.events,
        "other_rank_ms": 1e3 * found.other_rank_s,
        "kept_bytes_per_step": found.kept_bytes / case.num_steps,
    }


def print_table(found: dict[str, Any]) -> None:
    """The parts of a steady step, the steps of the change, and the other ranks."""
    for name, took_ms in found["parts_ms"].items():
        print(f"{name:>18}{took_ms:10.1f} ms")
    print(f"{'a steady step':>18}{found['mean_ms']:10.1f} ms, median {found['median_ms']:.1f}")
    print(f"{'the first step':>18}{found['first_ms']:10.1f} ms")
    print(f"{'steps of a change':>18}", *(f"{took_ms:9.1f}" for took_ms in found["change_ms"]))
    print(f"{'another rank':>18}{found['other_rank_ms']:10.1f} ms a step")
    print(f"{'kept for replay':>18}{found['kept_bytes_per_step'] / 1e6:10.2f} MB a step")
    verdict = "met" if found["mean_ms"] <= found["bar_ms"] else "missed"
    print(f"bar: {found['bar_ms']:.0f} ms a step of {STEP_S:g} s: {verdict}")


def main() -> int:
    """Measure, print, and write `--json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20, help="before the change")
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    given = parser.parse_args()
    values = provenance("benchmarks.rank0_cost")
    case = make_case(given.stages, given.microbatches, given.steps)
    measured = measure(case)
    found = result_of(case, measured)
    print_table(found)
    if given.json:
        write_json(given.json, values | found | {"load_after": load_averages()})
    return 0 if found["mean_ms"] <= found["bar_ms"] else 1


if __name__ == "__main__":
    sys.exit(main())
