"""Runs that train with each rank on a host of its own, and what a fault in one of them changes."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Self

from benchmarks.netns.faults import Fault, prepared
from benchmarks.netns.hosts import Hosts
from benchmarks.netns.tasks import run_tasks
from benchmarks.results import ROOT
from jaxmorph.records import Event, EventKind, StepRecord
from jaxmorph.report.run_directory import EVENTS, METRICS, read_records

_LIMIT_S = 300.0
_WARM_UP_STEPS = 2
_NOTHING = Fault("nothing", lambda hosts, works: None)


@dataclass(frozen=True)
class Job:
    """What is trained, and over which cards.

    Attributes:
        config: A file in `configs/`.
        num_steps: How many.
        overrides: Of the configuration.
        control_nic: The card over which ranks find one another and meet.
        sidecar_nics: Those of the sidecars; None: all that they find. By the first of them the
            two ends of a link agree.
    """

    config: str
    num_steps: int
    overrides: tuple[str, ...] = ()
    control_nic: int = 0
    sidecar_nics: tuple[int, ...] | None = None

    def with_overrides(self, *overrides: str) -> Self:
        """The job with more overrides."""
        return replace(self, overrides=(*self.overrides, *overrides))

    def command(self, hosts: Hosts, directory: Path, rank: int) -> list[str]:
        """What a rank of it runs."""
        addresses = []
        if self.sidecar_nics is not None:
            own = [hosts.address(rank, nic) for nic in self.sidecar_nics]
            addresses = [f"transport.addresses={json.dumps(own)}"]
        return [
            *(sys.executable, "-m", "jaxmorph", "train", str(ROOT / "configs" / self.config)),
            f"run={{dir: {json.dumps(str(directory))}, seed: 0, steps: {self.num_steps}}}",
            f"parallelism.stages={len(hosts.names)}",
            *self.overrides,
            *addresses,
        ]


@dataclass(frozen=True)
class Training:
    """What came of a run.

    Attributes:
        sent_bytes: What each card of the second host sent: also control messages.
    """

    steps: tuple[StepRecord, ...]
    events: tuple[Event, ...]
    sent_bytes: tuple[int, ...]

    @property
    def steps_s(self) -> tuple[float, ...]:
        """How long each step took."""
        return tuple(step.step_s for step in self.steps)

    @property
    def usual_s(self) -> float:
        """The median step, without the first few, which warm up."""
        return median(self.steps_s[_WARM_UP_STEPS:])

    @property
    def longest_s(self) -> float:
        """The longest of the same steps."""
        return max(self.steps_s[_WARM_UP_STEPS:])

    def events_of(self, kind: EventKind) -> list[Event]:
        """The events of one kind."""
        return [event for event in self.events if event.kind == kind]


def train_on(
    hosts: Hosts,
    directory: Path,
    job: Job,
    fault: Fault | None = None,
    after: float = 0.5,
    delay_s: float = 0.0,
) -> Training:
    """Train with a stage on each host, started as a cluster's job is.

    Args:
        after: The share of its steps done before the fault.
        delay_s: How long after the end of a step it happens.

    Raises:
        TaskFailedError: If a rank fails, or all are not done in time.
        RuntimeError: If training didn't meet the fault.
    """
    metrics = directory / METRICS
    before = _sent_bytes(hosts)
    with prepared(hosts, fault or _NOTHING, delay_s) as course:

        def watch() -> None:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= job.num_steps * after:
                course.start()

        def command(rank: int) -> list[str]:
            return job.command(hosts, directory, rank)

        run_tasks(hosts, command, _LIMIT_S, watch, job.control_nic)
        ended_s = time.monotonic()
    if not course.was_over_by(ended_s):
        raise RuntimeError(f"{job.num_steps} steps were over too soon for a fault in their midst")
    sent_bytes = zip(_sent_bytes(hosts), before, strict=True)
    return Training(
        tuple(read_records(metrics, StepRecord)),
        tuple(read_records(directory / EVENTS, Event)),
        tuple(now - then for now, then in sent_bytes),
    )


def lost(found: Training, expected: Training) -> int:
    """How many steps of a run another one didn't take."""
    return len(expected.steps) - len(found.steps)


def unlike(found: Training, expected: Training) -> int:
    """How many steps that two runs took have another loss or gradient norm, in any bit."""
    pairs = zip(_results(found.steps), _results(expected.steps), strict=False)
    return sum(a != b for a, b in pairs)


def _results(steps: Sequence[StepRecord]) -> list[tuple[int, float, float]]:
    return [(step.step, step.loss, step.grad_norm) for step in steps]


def _sent_bytes(hosts: Hosts) -> list[int]:
    return [hosts.sent_bytes(1, nic) for nic in range(hosts.num_nics)]
