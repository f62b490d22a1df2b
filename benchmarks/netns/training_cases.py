"""The cases of the bench in which a run trains, each rank of it on a host of its own."""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.netns.faults import Fault, host_cut_off, prepared, switch_out
from benchmarks.netns.hosts import Hosts, lay_hosts
from benchmarks.netns.outcomes import Outcome
from benchmarks.netns.tasks import TaskFailedError, run_tasks

ROOT = Path(__file__).parent.parent.parent
OUTAGE_S = 2.0
SLOW_MBIT = 20.0
_LIMIT_S = 240.0
_WARM_UP_STEPS = 2
_NOTHING = Fault("nothing", lambda hosts: None, lambda hosts: None)
_SLOW_NIC = 1

# A step takes a fraction of a second, a message (128 KiB) several chunks.
_OVERRIDES = (
    "model={factory: models.gpt2, preset: tiny}",
    "data.sequence_length=128",
    "batch={microbatches: 4, microbatch_size: 2}",
    "transport.chunk_bytes=32768",
    "emulation.accelerator=null",
    "trace.every_steps=0",
)


@dataclass(frozen=True)
class Training:
    """What came of a run.

    Attributes:
        losses: Of each step.
        steps_s: How long each step took.
        routes: How the links' transfers travelled in the last step.
        sent_bytes: What each card of the second host sent: also control messages.
    """

    losses: tuple[float, ...]
    steps_s: tuple[float, ...]
    routes: dict[str, str]
    sent_bytes: tuple[int, ...]


def train_on(
    hosts: Hosts, directory: Path, num_steps: int, route: str, fault: Fault | None = None
) -> Training:
    """Train with a stage on each host, started as a cluster's job is.

    Args:
        hosts: As many as stages.
        directory: Where the run is kept; not there yet.
        num_steps: How many.
        route: Of all links, "direct" or "delegated".
        fault: What happens when half of them are done.

    Raises:
        TaskFailedError: If a rank fails, or all are not done in time.
        RuntimeError: If training didn't meet the fault.
    """
    metrics = directory / "metrics.jsonl"
    before = _sent_bytes(hosts)
    with prepared(hosts, fault or _NOTHING) as happening:

        def watch() -> None:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= num_steps // 2:
                happening.start()

        run_tasks(hosts, _command(hosts, directory, num_steps, route), _LIMIT_S, watch)
        ended_s = time.monotonic()
    if not happening.was_over_by(ended_s):
        raise RuntimeError(f"{num_steps} steps were over too soon for a fault in the middle")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Training(
        tuple(step["loss"] for step in steps),
        tuple(step["step_s"] for step in steps),
        steps[-1]["routes"],
        tuple(now - then for now, then in zip(_sent_bytes(hosts), before, strict=True)),
    )


def _sent_bytes(hosts: Hosts) -> list[int]:
    return [hosts.sent_bytes(1, nic) for nic in range(hosts.num_nics)]


def _command(hosts: Hosts, directory: Path, num_steps: int, route: str) -> list[str]:
    return [
        *(sys.executable, "-m", "jaxmorph", "train", str(ROOT / "configs" / "demo.yaml")),
        *_OVERRIDES,
        f"run={{dir: {json.dumps(str(directory))}, seed: 0, steps: {num_steps}}}",
        f"parallelism.stages={len(hosts.names)}",
        f"routes.default={route}",
    ]


def training_outcomes(num_stages: int = 3, num_steps: int = 40) -> Iterator[Outcome]:
    """Each case's figures, as they come."""
    with lay_hosts(num_stages) as hosts, tempfile.TemporaryDirectory() as folder:

        def run(name: str, fault: Fault | None = None) -> Training:
            return train_on(hosts, Path(folder) / name, num_steps, "delegated", fault)

        expected = run("healthy")
        yield _usual_step("training over two cards, healthy", expected)
        hosts.set_rate(1, _SLOW_NIC, SLOW_MBIT)
        slow = f"training, one card of {SLOW_MBIT:g} Mbit/s"
        outages = (host_cut_off(1, "its host", OUTAGE_S), switch_out(OUTAGE_S))
        for number, fault in enumerate((None, *outages)):
            case = slow if fault is None else f"same, {fault.name}"
            try:
                found = run(f"case{number}", fault)
            except TaskFailedError as error:
                yield Outcome(case, "training", None, details={"error": str(error)})
                continue
            yield _usual_step(case, found)
            if fault is not None:
                yield Outcome(case, "longest step, s", max(found.steps_s))
            yield Outcome(case, "losses unlike the healthy", unlike(found, expected), 0)


def unlike(found: Training, expected: Training) -> int:
    """How many of two runs' losses differ, in any bit."""
    return sum(a != b for a, b in zip(found.losses, expected.losses, strict=True))


def _usual_step(case: str, training: Training) -> Outcome:
    """The median step, with the longest beside it, after the first few that warm up."""
    steps_s = training.steps_s[_WARM_UP_STEPS:]
    details = {"longest_step_s": max(steps_s), "sent_bytes": training.sent_bytes}
    return Outcome(case, "median step, s", median(steps_s), details=details)
