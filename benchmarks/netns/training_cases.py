"""The cases of the bench in which a run trains and its sidecars lose cards, or have slow ones."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.netns.faults import Fault, card_lost, host_cut_off, switch_out
from benchmarks.netns.hosts import Hosts, lay_hosts
from benchmarks.netns.outcomes import Outcome
from benchmarks.netns.tasks import TaskFailedError
from benchmarks.netns.trainings import Job, Training, lost, train_on, unlike

OUTAGE_S = 2.0
SLOW_MBIT = 20.0
_HOST, _SECOND_NIC = 1, 1

# A step takes a fraction of a second, a message (128 KiB) several chunks.
JOB = Job(
    "demo.yaml",
    40,
    (
        "model={factory: gpt2, preset: tiny}",
        "data.sequence_length=128",
        "batch={microbatches: 4, microbatch_size: 2}",
        "transport.chunk_bytes=32768",
        "emulation.accelerator=null",
        "adaptation.enabled=false",
        "trace.every_steps=0",
    ),
)


def training_outcomes() -> Iterator[Outcome]:
    """Each case's figures, as they come."""
    job = JOB.with_overrides("routes.default=delegated")
    with lay_hosts(3) as hosts, tempfile.TemporaryDirectory() as folder:

        def run(name: str, fault: Fault | None = None) -> Training:
            return train_on(hosts, Path(folder) / name, job, fault)

        expected = run("healthy")
        yield usual_step("training over two cards, healthy", expected)
        for number, (case, fault) in enumerate(_cases(hosts)):
            try:
                found = run(f"case{number}", fault)
            except TaskFailedError as error:
                yield Outcome(case, "training", None, details={"error": str(error)})
                continue
            yield usual_step(case, found)
            if fault is not None:
                yield Outcome(case, "longest step, s", found.longest_s)
            yield from same_results(case, found, expected)


def _cases(hosts: Hosts) -> Iterator[tuple[str, Fault | None]]:
    """What each is called, and what happens in it, once the cards are as it needs them."""
    lost_for_good = card_lost(_HOST, "its host", _SECOND_NIC)  # ranks meet over the first
    yield f"training, {lost_for_good.name}", lost_for_good
    hosts.set_rate(_HOST, _SECOND_NIC, SLOW_MBIT)
    yield f"training, one card of {SLOW_MBIT:g} Mbit/s", None
    for outage in (host_cut_off(_HOST, "its host", OUTAGE_S), switch_out(OUTAGE_S)):
        yield f"same, {outage.name}", outage


def same_results(case: str, found: Training, expected: Training) -> Iterator[Outcome]:
    """Whether a run took the steps of another one, to the same losses and gradient norms."""
    yield Outcome(case, "steps lost", lost(found, expected), 0)
    yield Outcome(case, "steps with other results", unlike(found, expected), 0)


def usual_step(case: str, training: Training) -> Outcome:
    """The median step, with the longest beside it."""
    details = {"longest_step_s": training.longest_s, "sent_bytes": training.sent_bytes}
    return Outcome(case, "median step, s", training.usual_s, details=details)
