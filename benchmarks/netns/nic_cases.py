"""The cases of the bench in which the card of the accelerators' network dies in mid-step.

Each host has two cards. The first one's address is that of the host's own name, by which Gloo finds
it: it carries the direct transfers. Ranks meet over the second, which the sidecars have, too, alone
or beside the first. All hosts call themselves alike, so that stages may be paced: they share this
machine's clock.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.netns.faults import Fault, card_lost, card_unplugged
from benchmarks.netns.hosts import Hosts, lay_hosts
from benchmarks.netns.outcomes import Outcome
from benchmarks.netns.tasks import TaskFailedError
from benchmarks.netns.training_cases import same_results, usual_step
from benchmarks.netns.trainings import Job, Training, train_on
from jaxmorph.records import EventKind

DIRECT_S = 2.0
OUTAGE_S = 5.0
CONTROL_NIC = 1
_BAR = 1.1  # of the deadline of a direct transfer
_STAGES, _INNER, _LAST = 4, 1, 3
_MID_STEP_S = 0.15  # the shortest step takes 0.39 s
_FIRST_STEPS = 2

JOB = Job(
    "pace4.yaml",
    100,
    (
        "failover.enabled=true",
        f"timeouts.direct_s={DIRECT_S:g}",
        "model.tied=false",  # else the first and the last stage have a link, too
    ),
    control_nic=CONTROL_NIC,
    sidecar_nics=(CONTROL_NIC,),
)
_FAILING_BACK = ("adaptation.enabled=true", "adaptation.failback_steps=3")


@dataclass(frozen=True)
class NicCase:
    """A card that dies.

    Attributes:
        fault: How.
        links: The direct links that go by it; all of them together may take one deadline.
        name: For the table.
        returns: Whether the card is there again after a while, in a run that adapts.
        sidecar_nics: The cards of the sidecars.
    """

    fault: Fault
    links: tuple[str, ...]
    name: str
    returns: bool = False
    sidecar_nics: tuple[int, ...] = (CONTROL_NIC,)


_DOWN, _SILENT = card_lost(_LAST, "last host"), card_unplugged(_LAST, "last host")
_INNER_DOWN, _INNER_SILENT = card_lost(_INNER, "inner host"), card_unplugged(_INNER, "inner host")
_DOWN_FOR_A_WHILE = card_lost(_LAST, "last host", lasts_s=OUTAGE_S)
_BOTH_CARDS = (CONTROL_NIC, 0)
CASES = (
    NicCase(_DOWN, ("2-3",), _DOWN.name),
    NicCase(_SILENT, ("2-3",), _SILENT.name),
    NicCase(_SILENT, ("2-3",), "same, sidecars over both cards", sidecar_nics=_BOTH_CARDS),
    NicCase(_INNER_DOWN, ("0-1", "1-2"), _INNER_DOWN.name),
    NicCase(_INNER_SILENT, ("0-1", "1-2"), _INNER_SILENT.name),
    NicCase(_DOWN_FOR_A_WHILE, ("2-3",), _DOWN_FOR_A_WHILE.name, returns=True),
)


def nic_outcomes() -> Iterator[Outcome]:
    """Each case's figures, as they come."""
    with lay_hosts(_STAGES, alike=True) as hosts, tempfile.TemporaryDirectory() as folder:
        expected = train_on(hosts, Path(folder) / "healthy", JOB)
        yield usual_step("direct links, healthy", expected)
        for number, case in enumerate(CASES):
            yield from _outcomes(hosts, Path(folder) / f"case{number}", case, expected)


def _outcomes(
    hosts: Hosts, directory: Path, case: NicCase, expected: Training
) -> Iterator[Outcome]:
    name = case.name
    try:
        found = train_through(hosts, directory, JOB, case)
    except TaskFailedError as error:
        yield Outcome(name, "training", None, details={"error": str(error)})
        return
    yield from same_results(name, found, expected)
    yield failure(case, found)
    if case.returns:
        restored = {event.link for event in found.events_of(EventKind.LINK_RESTORED)}
        yield Outcome(name, "links restored", len(restored), len(case.links), at_least=True)


def train_through(hosts: Hosts, directory: Path, job: Job, case: NicCase) -> Training:
    """A run in which a card dies in mid-step; for the arguments see `train_on`."""
    job = replace(job, sidecar_nics=case.sidecar_nics)
    if case.returns:  # it needs time to come back
        job = job.with_overrides(*_FAILING_BACK)
    after = 0.3 if case.returns else 0.5
    return train_on(hosts, directory, job, case.fault, after=after, delay_s=_MID_STEP_S)


def failure(case: NicCase, training: Training) -> Outcome:
    """How much longer than those before it the longest step took in which a path failed.

    Args:
        case: Which links are to fail; if others do, or none, there is no figure.
    """
    events = training.events_of(EventKind.LINK_FAILED)
    failed = sorted({event.link or "" for event in events})
    details = {
        "failed": [
            {"step": each.step, "link": each.link, "detail": each.detail} for each in events
        ],
        "sent_bytes": training.sent_bytes,
    }
    outcome = Outcome(case.name, "extra time, of a deadline", None, _BAR, details=details)
    if failed != list(case.links):
        return outcome
    steps = sorted({event.step for event in events})
    before_s = median(training.steps_s[_FIRST_STEPS : steps[0]])
    extra_s = max(training.steps_s[step] for step in steps) - before_s
    details["before_s"] = before_s
    details["after_s"] = median(training.steps_s[steps[-1] + 1 :])
    return replace(outcome, value=extra_s / DIRECT_S)
