"""One run through all of its faults, and what came of each."""

import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import (
    CUTS,
    FIRST_STEP,
    KINDS,
    QUIET_STEPS,
    TROUBLES,
    Dealer,
    Trouble,
    begun,
    draw_troubles,
    trace_text,
)
from benchmarks.chaos.harm import CARDS, LEFT, Harm, disk
from benchmarks.chaos.judgement import WHOLE_RUN, Computed, Outcome, blame, computed_by, differences
from benchmarks.chaos.watched_run import ROOT, START_S, EndedError, Heard, HungError, WatchedRun
from jaxmorph.config import load_config
from jaxmorph.emulation.link_trace import read_link_trace
from jaxmorph.records import EventKind

CONFIG = ROOT / "configs" / "chaos.yaml"
STEP_S = 8.0
LIMIT_S = STEP_S + 10.0
"""No run may stand still for longer, but for what its ranks need to start."""
_AFTERWARDS_S = 5.0
_POLL_S = 0.05
_RESTARTS = "restart_policy={max_restarts: 1000, backoff_s: 0.1, from_start: true}"
_NO_RESTARTS = "restart_policy={max_restarts: 0}"  # a rank that dies of itself is a mistake
_OVERRIDES = (
    f"timeouts={{step_s: {STEP_S}, direct_s: 1.0}}",
    f"transport.addresses=[{', '.join(CARDS)}]",
)


@dataclass
class Storm:
    """The faults of a run and what came of them.

    Attributes:
        ranks_end: Whether ranks end and start again. Then no link is cut: emulated cuts hold only
            until the first restart.
        outcomes: Of each fault of a process or a file, in order; the last is of the run as a whole.
        troubles: How many its links had, by their kinds.
        events: How many of each kind it has recorded.
        wrong: Differences from an undisturbed run, or why it ended early.
    """

    seed: int
    ranks_end: bool
    outcomes: list[Outcome] = field(default_factory=list)
    troubles: Counter[str] = field(default_factory=Counter)
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
        return sum(each.kind != WHOLE_RUN for each in self.outcomes) + self.troubles.total()

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
            run.wait_for_step(num_steps - 1, LIMIT_S)
            if run.finish(LIMIT_S) != 0:
                raise EndedError(run.last_output())
            return computed_by(run.out)


def run_storm(
    storm: Storm,
    num_steps: int,
    expected: Computed,
    dealer: Dealer,
    enough: Callable[[], bool],
    *,
    own_disk: bool,
) -> None:
    """Take a run through faults, and write down what comes of them.

    Args:
        expected: The results without faults.
        enough: Whether no more faults are wanted; the run then goes on to its end in peace.
        own_disk: Whether it may be given a disk of its own.
    """
    began_s, troubles = time.monotonic(), _troubles(storm, dealer.wanted)
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        folder = Path(name)
        (apart := folder / "disk").mkdir()
        if own_disk:
            opened.enter_context(disk(apart))
        trace = folder / "links.csv"
        trace.write_text(trace_text(troubles))
        read_link_trace(trace)  # an invalid trace is this script's mistake, so it fails here
        overrides = (
            *_OVERRIDES,
            _RESTARTS if storm.ranks_end else _NO_RESTARTS,
            f"run.steps={num_steps}",
            f"emulation.trace={trace}",
        )
        module, whole = "benchmarks.chaos.hanging_rank", Outcome(WHOLE_RUN)
        with WatchedRun(folder / "run", CONFIG, overrides, apart / "out", module) as run:
            try:
                _disturb(run, storm, num_steps, dealer, enough)
                storm.wrong = differences(computed_by(run.out), expected)
                whole.leaks = tuple(run.traces.left_after(_AFTERWARDS_S, run.out))
            except HungError as error:
                whole.hang = "" if storm.outcomes and storm.outcomes[-1].hang else str(error)
            except EndedError as error:
                storm.wrong.append(f"step {run.last_step() + 1}: {error}")
            storm.outcomes.append(whole)
            blame(storm.wrong, storm.outcomes)
            storm.troubles = Counter(begun(troubles, lives_s(run)))
            storm.events = Counter(event.kind for event in run.events())
    storm.seconds = time.monotonic() - began_s


def _troubles(storm: Storm, wanted: Sequence[str]) -> tuple[Trouble, ...]:
    config = load_config(CONFIG)
    routes, stages = config.routes, config.parallelism.stages
    links = [f"{low}-{low + 1}" for low in range(stages - 1)]
    direct = [link for link in links if routes.by_link.get(link, routes.default) == "direct"]
    can_be = [
        kind for kind in TROUBLES if kind in wanted and not (storm.ranks_end and kind in CUTS)
    ]
    return draw_troubles(random.Random(storm.seed + 1_000_003), stages, direct, can_be)


def _disturb(
    run: WatchedRun, storm: Storm, num_steps: int, dealer: Dealer, enough: Callable[[], bool]
) -> None:
    run.wait_for_step(FIRST_STEP, LIMIT_S)
    rng = random.Random(storm.seed)
    harm, stages = Harm(run, rng, LIMIT_S, num_steps, {}), load_config(CONFIG).parallelism.stages
    while run.last_step() < num_steps - QUIET_STEPS and not enough():
        kind = dealer.deal(ranks_end=storm.ranks_end)
        if kind is None:
            break
        outcome = _one_fault(harm, kind, rng.randrange(stages), storm, dealer)
        if outcome is not None:
            dealer.met[kind] = dealer.met.get(kind, 0) + 1
        run.wait_for_step(min(run.last_step() + rng.randint(1, 3), num_steps - 1), LIMIT_S)
    run.wait_for_step(num_steps - 1, LIMIT_S)
    if run.finish(LIMIT_S) != 0:
        raise EndedError(run.last_output())


def _one_fault(harm: Harm, kind: str, rank: int, storm: Storm, dealer: Dealer) -> Outcome | None:
    """Do one and see the run through it; None if it was not injected."""
    run, heard = harm.run, Heard(harm.run)
    run.traces.note()
    outcome, began_s = Outcome(kind, run.last_step()), time.monotonic()
    storm.outcomes.append(outcome)
    try:
        told = harm.do(kind, rank, dealer.moment(ranks_end=storm.ranks_end))
        if told is None:
            storm.outcomes.remove(outcome)
            return None
        outcome.told, *left = told.split(LEFT)
        outcome.leaks = tuple(left)
        stays = KINDS[kind].ends != "nothing" or not KINDS[kind].stands_s[1]
        lasted_s = 0.0 if stays else time.monotonic() - began_s
        _see_through(harm, heard, rank, outcome)
        outcome.recovered_s = time.monotonic() - began_s - lasted_s
    except HungError as error:
        outcome.hang = str(error)
        raise
    return outcome


def _see_through(harm: Harm, heard: Heard, rank: int, outcome: Outcome) -> None:
    """Wait until the run has named the cause, and has done a later step.

    Raises:
        HungError: It stands still.
        EndedError: It has ended.
    """
    run, kind = harm.run, KINDS[outcome.kind]
    named = kind.named.replace("{rank}", str(rank))
    named_s = LIMIT_S + (START_S if kind.ends == "command" else 0.0)
    outcome.unnamed = bool(named) and not _hears(run, heard, named, named_s)
    if kind.ends == "ranks" and not _hears(run, heard, "^restarted: ", START_S):
        raise HungError(f"no restart came to its end within {START_S:g} s\n{run.evidence()}")
    if kind.ends == "command" and not _hears(run, heard, "^resumed: ", START_S):
        raise HungError(f"not resumed within {START_S:g} s\n{run.evidence()}")
    seen = outcome.step if kind.ends == "nothing" else run.last_step()
    run.wait_for_step(min(max(seen, outcome.step) + 1, harm.num_steps - 1), LIMIT_S)


def _hears(run: WatchedRun, heard: Heard, pattern: str, within_s: float) -> bool:
    """Wait for something that the run says; whether it came in time.

    Raises:
        EndedError: The run has ended.
    """
    until_s = time.monotonic() + within_s
    while not heard.says(pattern):
        if run.process.poll() == 0:  # it has done all its steps
            return heard.says(pattern)
        if run.process.poll() is not None:
            raise EndedError(f"ended before it said {pattern!r}: {run.last_output()}")
        if time.monotonic() > until_s:
            return False
        time.sleep(_POLL_S)
    return True


def lives_s(run: WatchedRun) -> list[float]:
    """For how long each launch of the ranks has trained; undone steps don't count."""
    starts = [event.step for event in run.events() if event.kind == EventKind.RESUMED]
    life_s: defaultdict[int, float] = defaultdict(float)
    for record in run.steps():
        life_s[sum(start <= record.step for start in starts)] += record.step_s
    return list(life_s.values())
