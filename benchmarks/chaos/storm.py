"""One run through all of its faults, and what came of it."""

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import Trouble, draw_faults, draw_troubles, trace_text
from benchmarks.chaos.features import Features
from benchmarks.chaos.harm import harm
from benchmarks.chaos.judgement import Computed, computed_by, differences
from benchmarks.chaos.watched_run import ROOT, EndedError, HungError, WatchedRun
from jaxmorph.config import load_config
from jaxmorph.emulation.link_trace import read_link_trace
from jaxmorph.records import EventKind

CONFIG = ROOT / "configs" / "chaos.yaml"
_AFTERWARDS_S = 5.0


@dataclass
class Storm:
    """The faults and results of a run.

    Attributes:
        seed: Of its faults.
        faults: How many there were of each kind.
        events: How many of each kind the run has recorded.
        wrong: Differences from an undisturbed run, or why it ended early.
        hangs: What was seen when it hung.
        leaks: What was left of it.
        seconds: How long it took.
    """

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passes(self) -> bool:
        """Whether the faults changed nothing."""
        return not (self.wrong or self.hangs or self.leaks)

    def to_json(self) -> dict[str, Any]:
        """All of it in JSON's types."""
        return {**vars(self), "faults": dict(self.faults), "events": dict(self.events)}


def undisturbed(num_steps: int, patience_s: float) -> Computed:
    """The results of the configuration without faults.

    Args:
        num_steps: How many steps it trains.
        patience_s: How long it may take from one step to the next.

    Raises:
        HungError: If it takes longer.
        EndedError: If it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        calm = ("adaptation.enabled=false", f"run.steps={num_steps}")
        with WatchedRun(Path(folder), CONFIG, calm) as run:
            run.wait_for_step(num_steps - 1, patience_s)
            if run.finish(patience_s) != 0:
                raise EndedError(run.last_output())
            return computed_by(run.out)


def run_storm(
    seed: int, num_steps: int, expected: Computed, features: Features, patience_s: float
) -> Storm:
    """Take a run through the faults of a seed.

    Args:
        seed: Of the faults.
        num_steps: How many steps it trains.
        expected: The results without faults.
        features: What it can outlive.
        patience_s: How long it may take from one step to the next before it counts as hung.
    """
    storm, began_s = Storm(seed), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, troubles = Path(name), _troubles(seed, features)
        (storage := folder / "storage" / "checkpoints").mkdir(parents=True)
        trace = folder / "links.csv"
        trace.write_text(trace_text(troubles, features))
        read_link_trace(trace)  # an invalid trace is this script's mistake, so it fails here
        overrides = (
            *features.overrides(),
            f"run.steps={num_steps}",
            f"checkpoint.dir={storage}",
            f"emulation.trace={trace}",
        )
        with WatchedRun(folder / "run", CONFIG, overrides) as run:
            try:
                _disturb(run, storm, storage, num_steps, features, patience_s)
                storm.wrong = differences(computed_by(run.out), expected)
            except HungError as error:
                storm.hangs.append(str(error))
            except EndedError as error:
                storm.wrong.append(str(error))
            else:
                storm.leaks = run.traces.left_after(_AFTERWARDS_S, run.out)
            storm.faults += troubles_met(troubles, run)
            storm.events = Counter(event.kind for event in run.events())
    storm.seconds = time.monotonic() - began_s
    return storm


def _troubles(seed: int, features: Features) -> tuple[Trouble, ...]:
    config = load_config(CONFIG)
    routes, stages = config.routes, config.parallelism.stages
    links = [f"{low}-{low + 1}" for low in range(stages - 1)]
    direct = [link for link in links if routes.by_link.get(link, routes.default) == "direct"]
    return draw_troubles(seed, stages, direct, features)


def _num_ranks() -> int:
    return load_config(CONFIG).parallelism.stages


def _disturb(
    run: WatchedRun,
    storm: Storm,
    storage: Path,
    num_steps: int,
    features: Features,
    patience_s: float,
) -> None:
    run.wait_for_step(0, patience_s)
    with_sidecar = frozenset(run.sidecars())
    for fault in draw_faults(storm.seed, num_steps, _num_ranks(), with_sidecar, features):
        run.wait_for_step(fault.step, patience_s)
        run.traces.note()
        storm.faults[fault.kind] += harm(run, storage, fault, patience_s)
    run.wait_for_step(num_steps - 1, patience_s)
    if run.finish(patience_s) != 0:
        raise EndedError(run.last_output())


def troubles_met(troubles: Sequence[Trouble], run: WatchedRun) -> Counter[str]:
    """How many troubles of each kind began while steps were taken.

    Args:
        troubles: Of a run; they begin again with each restart.
        run: It has been through them.
    """
    starts = [event.step for event in run.events() if event.kind == EventKind.RESUMED]
    life_s: defaultdict[int, float] = defaultdict(float)
    for record in run.steps():
        life_s[sum(start <= record.step for start in starts)] += record.step_s
    longest_s = max(life_s.values(), default=0.0)
    return Counter(f"link {each.kind}" for each in troubles if each.begins_s < longest_s)
