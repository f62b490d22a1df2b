"""One run through all of its faults, and what came of each."""

import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import (
    CUTS,
    FIRST_STEP,
    KINDS,
    LINK_KINDS,
    QUIET_STEPS,
    Dealer,
    LinkFault,
    begun,
    draw_link_faults,
    trace_text,
)
from benchmarks.chaos.injection import CARDS, Injector, disk
from benchmarks.chaos.judgement import (
    WHOLE_RUN,
    Computed,
    Outcome,
    attribute,
    computed_by,
    differences,
)
from benchmarks.chaos.watched_run import START_S, EndedError, HungError, NewOutput, WatchedRun
from benchmarks.results import ROOT
from jaxmorph.config import load_config
from jaxmorph.emulation.link_trace import read_link_trace
from jaxmorph.records import EventKind

CONFIG = ROOT / "configs" / "chaos.yaml"
STEP_S = 8.0
LIMIT_S = STEP_S + 10.0
"""No run may stand still for longer, but for what its ranks need to start."""
_AFTERWARDS_S = 5.0
_RESTARTS = (
    "restart_policy={max_restarts: 1000, backoff_s: 0.1, from_start: true, compilation_cache: true}"
)
# A rank that dies of itself is a mistake.
_NO_RESTARTS = "restart_policy={max_restarts: 0, compilation_cache: true}"
_OVERRIDES = (
    f"timeouts={{step_s: {STEP_S}, direct_s: 1.0}}",
    f"transport.addresses=[{', '.join(CARDS)}]",
)


@dataclass
class DisturbedRun:
    """The faults of a run and what came of them.

    Attributes:
        ranks_end: Whether ranks end and start again. Then no link is cut: emulated cuts hold only
            until the first restart.
        outcomes: Of each fault of a process or a file, in order; the last is of the run as a whole.
        link_faults: How many its links had, by their kinds.
        events: How many of each kind it has recorded.
        wrong: Differences from an undisturbed run, or why it ended early.
    """

    seed: int
    ranks_end: bool
    outcomes: list[Outcome] = field(default_factory=list)
    link_faults: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passes(self) -> bool:
        """Whether the faults changed nothing."""
        return not self.wrong and all(each.holds for each in self.outcomes)

    @property
    def num_faults(self) -> int:
        """Of processes, files and links."""
        return sum(each.kind != WHOLE_RUN for each in self.outcomes) + self.link_faults.total()

    def to_json(self) -> dict[str, Any]:
        """All of it in JSON's types."""
        return {**vars(self), "outcomes": [vars(each) for each in self.outcomes]}


def undisturbed(num_steps: int) -> Computed:
    """The results of the configuration without faults.

    Raises:
        HungError: It hangs.
        EndedError: It fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        calm = ("adaptation.enabled=false", f"run.steps={num_steps}")
        with WatchedRun(Path(folder), CONFIG, calm) as run:
            run.wait_for_end(num_steps, LIMIT_S)
            return computed_by(run.out)


def disturbed(
    seed: int,
    num_steps: int,
    expected: Computed,
    dealer: Dealer,
    enough: Callable[[], bool],
    *,
    own_disk: bool,
) -> DisturbedRun:
    """Take a run through faults.

    Args:
        expected: The results without faults.
        enough: Whether no more faults are wanted; the run then goes on to its end in peace.
        own_disk: Whether it may be given a disk of its own.
    """
    result, began_s = DisturbedRun(seed, dealer.ranks_may_end()), time.monotonic()
    link_faults = _link_faults(result, dealer)
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        folder = Path(name)
        (apart := folder / "disk").mkdir()
        if own_disk:
            opened.enter_context(disk(apart))
        trace = folder / "links.csv"
        trace.write_text(trace_text(link_faults))
        read_link_trace(trace)  # an invalid trace is this script's mistake, so it fails here
        overrides = (
            *_OVERRIDES,
            _RESTARTS if result.ranks_end else _NO_RESTARTS,
            f"run.steps={num_steps}",
            f"emulation.trace={trace}",
        )
        module, whole = "benchmarks.chaos.hanging_rank", Outcome(WHOLE_RUN)
        with WatchedRun(folder / "run", CONFIG, overrides, apart / "out", module) as run:
            try:
                _disturb(run, result, num_steps, dealer, enough)
                result.wrong = differences(computed_by(run.out), expected)
                whole.leaks = tuple(run.traces.left_after(_AFTERWARDS_S, run.out))
            except HungError as error:
                whole.hang = "" if result.outcomes and result.outcomes[-1].hang else str(error)
            except EndedError as error:
                result.wrong.append(f"step {run.last_step() + 1}: {error}")
            result.outcomes.append(whole)
            attribute(result.wrong, result.outcomes)
            result.link_faults = Counter(begun(link_faults, _trained_s(run)))
            result.events = Counter(event.kind for event in run.events())
    dealer.counts += result.link_faults
    result.seconds = time.monotonic() - began_s
    return result


def _link_faults(result: DisturbedRun, dealer: Dealer) -> tuple[LinkFault, ...]:
    config = load_config(CONFIG)
    routes, stages = config.routes, config.parallelism.stages
    links = [f"{low}-{low + 1}" for low in range(stages - 1)]
    direct = [link for link in links if routes.by_link.get(link, routes.default) == "direct"]
    kinds = [
        kind
        for kind in LINK_KINDS
        if kind in dealer.needed and not (result.ranks_end and kind in CUTS)
    ]
    return draw_link_faults(random.Random(result.seed + 1_000_003), stages, direct, kinds)


def _disturb(
    run: WatchedRun,
    result: DisturbedRun,
    num_steps: int,
    dealer: Dealer,
    enough: Callable[[], bool],
) -> None:
    run.wait_for_step(FIRST_STEP, LIMIT_S)
    rng, stages = random.Random(result.seed), load_config(CONFIG).parallelism.stages
    injector = Injector(run, rng, LIMIT_S, num_steps)
    while run.last_step() < num_steps - QUIET_STEPS and not enough():
        kind = dealer.deal(ranks_end=result.ranks_end)
        if kind is None:
            break
        dealer.counts[kind] += _inject(injector, kind, rng.randrange(stages), result, dealer)
        run.wait_for_step(min(run.last_step() + rng.randint(1, 3), num_steps - 1), LIMIT_S)
    run.wait_for_end(num_steps, LIMIT_S)


def _inject(injector: Injector, kind: str, rank: int, result: DisturbedRun, dealer: Dealer) -> bool:
    """Inject one and see the run through it; whether it could be injected."""
    run, output = injector.run, NewOutput(injector.run)
    resumable = run.has_checkpoint()
    run.traces.note()
    outcome, began_s = Outcome(kind, run.last_step()), time.monotonic()
    result.outcomes.append(outcome)
    try:
        injected = injector.inject(kind, rank, dealer.moment(ranks_end=result.ranks_end))
        if injected is None:
            result.outcomes.remove(outcome)
            return False
        outcome.detail, outcome.leaks = injected.detail, injected.leaks
        stays = KINDS[kind].ends != "nothing" or not KINDS[kind].lasts_s[1]
        lasted_s = 0.0 if stays else time.monotonic() - began_s
        _see_through(injector, output, rank, outcome, resumable=resumable)
        outcome.recovered_s = time.monotonic() - began_s - lasted_s
    except HungError as error:
        outcome.hang = str(error)
        raise
    return True


def _see_through(
    injector: Injector, output: NewOutput, rank: int, outcome: Outcome, *, resumable: bool
) -> None:
    """Wait until the run has named the cause, and has done a later step.

    Args:
        resumable: Whether there was a checkpoint before; without one the command begins again.

    Raises:
        HungError: It stands still.
        EndedError: It has ended.
    """
    run, kind = injector.run, KINDS[outcome.kind]
    named = kind.named.replace("{rank}", str(rank))
    named_s = LIMIT_S + (START_S if kind.ends == "command" else 0.0)
    outcome.unnamed = bool(named) and not output.matches_within(named_s, named)
    resumed = "resumed" if resumable else "(resumed|plan_adopted)"
    restart_event = {"ranks": "restarted", "command": resumed}.get(kind.ends)
    if restart_event and not output.matches_within(START_S, f"^{restart_event}: "):
        raise HungError(f"no event {restart_event} within {START_S:g} s\n{run.evidence()}")
    seen = outcome.step if kind.ends == "nothing" else run.last_step()
    run.wait_for_step(min(max(seen, outcome.step) + 1, injector.num_steps - 1), LIMIT_S)


def _trained_s(run: WatchedRun) -> list[float]:
    """For how long each launch of the ranks has trained; undone steps don't count."""
    starts = [event.step for event in run.events() if event.kind == EventKind.RESUMED]
    trained_s: defaultdict[int, float] = defaultdict(float)
    for record in run.steps():
        trained_s[sum(start <= record.step for start in starts)] += record.step_s
    return list(trained_s.values())
