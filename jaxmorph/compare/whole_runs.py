"""Compares whole runs of `jaxmorph train`, one for each system and condition.

Measured steps (`condition_steps`) can't show the cost of a failure: that takes checkpoints,
restarts and first steps.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from jaxmorph.compare.matrix_record import divergence
from jaxmorph.compare.systems import Restarts, System, system_config
from jaxmorph.config import Config
from jaxmorph.config.compare_section import Condition
from jaxmorph.errors import RunFailedError, RunStoppedError
from jaxmorph.plain_json import parse_line
from jaxmorph.records import Event, EventKind, RunHeader, RunSummary, StepRecord
from jaxmorph.report.run_directory import EVENTS, METRICS, RECOVERY, RecoveryFile, read_records
from jaxmorph.report.run_matrix import Run, StepTimes
from jaxmorph.report.terminal import Reporter
from jaxmorph.training.resume import RunStart
from jaxmorph.training.start import run_here

RUNS = "runs"
"""The folder of a comparison's directory with the runs' directories."""
_COUNTED = frozenset({
    EventKind.RANK_FAILED, EventKind.RESTARTED, EventKind.CHECKPOINT_SAVED,
    EventKind.CHECKPOINT_FAILED, EventKind.LINK_FAILED, EventKind.LINK_RESTORED,
    EventKind.STRAGGLER_DETECTED, EventKind.LINK_HANDED_OVER, EventKind.PLAN_CHANGED,
    EventKind.ROUTE_CHANGED, EventKind.SUM_SLOW, EventKind.REMAPPED,
})  # fmt: skip
_SHOWN = frozenset({
    EventKind.RANK_FAILED, EventKind.RESTARTED, EventKind.LINK_FAILED, EventKind.LINK_RESTORED,
})  # fmt: skip
_ENDED = "the comparison has ended with it, and its results so far are written"
_JAX_CACHE = "JAX_COMPILATION_CACHE_DIR"


class Progress(Reporter):
    """Reports a run's progress in a few lines.

    Attributes:
        elapsed_s: From the start of the first step to the end of the last; None before that.
    """

    def __init__(self, say: Callable[[str], None], name: str) -> None:
        self._say = say
        self.name = name
        self._num_steps = 0
        self.elapsed_s: float | None = None

    def start(self, header: RunHeader) -> None:
        """Keep the number of steps."""
        self._num_steps = header.num_steps

    def step(self, record: StepRecord) -> None:
        """Print a line for each tenth of the run."""
        if (record.step + 1) % max(1, self._num_steps // 10) == 0:
            self._say(f"{self.name}: step {record.step + 1} of {self._num_steps}")

    def event(self, event: Event) -> None:
        """Print failures of ranks and links, and recoveries."""
        if event.kind in _SHOWN:
            self._say(f"{self.name}: {event.kind.replace('_', ' ')}: {event.detail}")

    def finish(self, summary: RunSummary) -> None:
        """Keep the length of the run."""
        self.elapsed_s = summary.elapsed_s


def whole_config(config: Config, system: System, condition: Condition, directory: Path) -> Config:
    """The configuration of a system's run under a condition."""
    own = system_config(config, system)
    steps = config.compare.steps if config.compare else config.run.steps
    # By default nothing is kept from run to run: otherwise the first one would start the slowest.
    cache = own.restart_policy.compilation_cache
    restarts: Mapping[Restarts, Mapping[str, Any]] = {
        "never": {"max_restarts": 0, "compilation_cache": False},
        "cold": {"compilation_cache": False},
        "warm": {"compilation_cache": True if cache == "auto" else cache},
    }
    return own.model_copy(
        update={
            "run": own.run.model_copy(update={"dir": str(directory), "steps": steps}),
            "optimizer": own.optimizer.model_copy(
                update={"warmup_steps": min(steps, own.optimizer.warmup_steps)}
            ),
            "emulation": own.emulation.model_copy(
                update={
                    "links": condition.links,
                    "hosts": condition.hosts,
                    "trace": condition.trace,
                }
            ),
            "checkpoint": own.checkpoint.model_copy(update={"dir": None}),
            "restart_policy": own.restart_policy.model_copy(update=restarts[system.restarts]),
            "compare": None,
        }
    )


def run_whole(
    config: Config,
    system: System,
    condition: Condition,
    directory: Path,
    say: Callable[[str], None],
    put: Callable[[Run], None],
) -> None:
    """Run a system under a condition to its end.

    Args:
        directory: The run's, which doesn't exist yet.
        say: Takes lines about the progress.
        put: Takes the run, also if it failed or was ended.

    Raises:
        RunStoppedError: It was asked to end, and the comparison ends with it.
    """
    progress = Progress(say, f"{system.name}, {condition.name}")

    def put_run(failure: str | None) -> None:
        elapsed_s = None if failure else progress.elapsed_s
        put(read_whole(system.name, condition.name, directory, elapsed_s, failure))

    try:
        with _caches_of(system.restarts):
            start = RunStart(whole_config(config, system, condition, directory))
            asked_to_end = run_here(start, progress)
    except RunFailedError as error:
        put_run("; ".join(str(error).splitlines()[:2]))
        if error.asked_to_end:
            raise RunStoppedError(f"{progress.name}: {error}; {_ENDED}") from error
    except RunStoppedError as error:
        put_run("asked to end")
        raise RunStoppedError(f"{progress.name}: {error}; {_ENDED}", error.exit_code) from error
    except KeyboardInterrupt:
        put_run("interrupted")
        raise
    else:
        put_run(None)
        if asked_to_end:
            raise RunStoppedError(f"{progress.name}: asked to end in its last step; {_ENDED}")


@contextmanager
def _caches_of(restarts: Restarts) -> Iterator[None]:
    """Hide JAX's cache variable from the ranks of a system that restarts cold."""
    hidden = os.environ.pop(_JAX_CACHE, None) if restarts == "cold" else None
    try:
        yield
    finally:
        if hidden is not None:
            os.environ[_JAX_CACHE] = hidden


def read_whole(
    system: str, condition: str, directory: Path, elapsed_s: float | None, failure: str | None
) -> Run:
    """Read a run's results from its directory.

    Args:
        elapsed_s: From the start of the first step to the end of the last, if it has ended.
    """
    steps = read_records(directory / METRICS, StepRecord)
    events = read_records(directory / EVENTS, Event)
    kinds = Counter(event.kind for event in events if event.kind in _COUNTED)
    bubbles = [step.bubble_rate for step in steps if step.bubble_rate is not None]
    losses = [step.loss for step in steps]
    costs = _costs(directory / RECOVERY)
    return Run(
        system=system,
        condition=condition,
        step_ms=StepTimes.of([1e3 * step.step_s for step in steps]) if steps else None,
        bubble_rate=median(bubbles) if bubbles else None,
        loss=losses[-1] if losses and math.isfinite(losses[-1]) else None,
        # A step that isn't finite is skipped, and the run goes on.
        failed=f"{len(steps)} steps done: {failure}" if failure else divergence(losses[-1:]),
        events=dict(kinds),
        total_s=elapsed_s,
        goodput=costs.goodput,
        recoveries=costs.recoveries,
        held_up_s=_held_up_s(events),
        moves=tuple(
            event.evidence["phases_s"]
            for event in events
            if event.kind == EventKind.REOPENED and event.evidence
        ),
    )


def _held_up_s(events: Iterable[Event]) -> float:
    """How long failed direct paths held up their ends' queues.

    Of paths that failed in one step, the longest counts: links of one card share a deadline.
    """
    of_steps: dict[int, float] = {}
    for event in events:
        if event.kind == EventKind.LINK_FAILED:
            held_up_s = (event.evidence or {}).get("held_up_s", 0.0)
            of_steps[event.step] = max(held_up_s, of_steps.get(event.step, 0.0))
    return sum(of_steps.values(), 0.0)


def _costs(path: Path) -> RecoveryFile:
    if not path.exists():
        return RecoveryFile()
    return parse_line(RecoveryFile, path.read_text(encoding="utf-8"), str(path))
