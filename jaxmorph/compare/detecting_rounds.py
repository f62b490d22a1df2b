"""Rounds of a comparison in which a system detects by itself what its links do."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jaxmorph.config import Config
from jaxmorph.control.link_state import PathFailure
from jaxmorph.program.instructions import parse_program
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.report import StepReport, measured_timeline
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import StepResult
from jaxmorph.training.adaptation import Adaptation, open_control_loop
from jaxmorph.training.bookkeeping import step_observed
from jaxmorph.training.control_loop import ControlLoop, Morph
from jaxmorph.training.first_plan import FirstPlan
from jaxmorph.training.loop import Callback, Effect
from jaxmorph.training.plan_in_force import PlanInForce


class RoundRecord:
    """The plan in force and the events of a round, worked out beside the steps.

    Args:
        loop: The controller; None on all ranks but rank 0: then nothing is recorded.
    """

    def __init__(self, in_force: PlanInForce, loop: ControlLoop | None) -> None:
        self.in_force = in_force
        self.events: Counter[str] = Counter()
        self._loop = loop
        self._thread = ThreadPoolExecutor(1, "jaxmorph-morphs")
        self._done: list[Any] = []

    def note(self, step: int, reports: Sequence[StepReport]) -> None:
        """Have the controller observe a step."""
        if self._loop is not None:
            self._done.append(self._thread.submit(self._observe, self._loop, step, reports))

    def adopt(self, morph: Morph, step: int) -> None:
        """Record another plan.

        Args:
            step: The first step that runs it.
        """
        if self._loop is not None:
            self._done.append(self._thread.submit(self._adopt, self._loop, morph))

    def finish(self) -> None:
        """Wait until all is recorded.

        Raises:
            Exception: What has gone wrong with it.
        """
        self._thread.shutdown()
        for done in self._done:
            done.result()

    def _observe(self, loop: ControlLoop, step: int, reports: Sequence[StepReport]) -> None:
        seen = step_observed(step, measured_timeline(reports), reports)
        self.events.update(event.kind for event in loop.observe(seen))

    def _adopt(self, loop: ControlLoop, morph: Morph) -> None:
        programs = tuple(map(parse_program, morph.programs))
        self.in_force = PlanInForce(morph.plan, programs, self.in_force.rank, morph.slots)
        self.events.update(event.kind for event in loop.adopted(morph))


class Following(Callback):
    """One rank's adaptation in a round.

    Args:
        failed: This rank's ends without a direct path from the round's first step on, each as it
            would report a new failure.
    """

    def __init__(
        self, adaptation: Adaptation, record: RoundRecord, failed: Sequence[PathFailure] = ()
    ) -> None:
        self._adaptation = adaptation
        self.record = record
        self._failed = tuple(failed)

    def report(self, step: int) -> tuple[Any, ...]:
        """What this rank adds to its report of a step."""
        paths, *others = self._adaptation.report(step)
        failed, self._failed = self._failed, ()  # once: the controller begins with the round
        return replace(paths, failures=(*failed, *paths.failures)), *others

    def after(self, result: StepResult) -> Effect:
        """Record the step; the next one may run another plan."""
        self.record.note(result.step, result.reports)
        return self._adaptation.after(result)


@contextmanager
def following(
    config: Config,
    first: FirstPlan,
    rendezvous: Rendezvous,
    trainer: StageTrainer,
    num_tied: int,
    last_step: int,
    failed: Sequence[PathFailure] = (),
) -> Iterator[Following]:
    """A round that begins with the plan for healthy links, and morphs by what it detects.

    Yields:
        The callback of its loop. Its record is whole once this is over.
    """
    leads = rendezvous.rank == 0
    with open_control_loop(config, first, num_tied, active=leads, to_plan=config) as loop:
        record = RoundRecord(first.in_force, loop)
        try:
            adaptation = Adaptation(rendezvous, trainer, record, loop, last_step)
            yield Following(adaptation, record, failed)
        finally:
            record.finish()
