"""The section of a configuration that says when a run saves its state, and where."""

from typing import Annotated

from pydantic import Field

from jaxmorph.config.sections import Count, CountOrZero, Expected, Positive, Section


class Checkpoint(Section):
    """When a run's state is saved, how many checkpoints are kept, and where.

    After every N-th step, once so many minutes have passed since the last save, and after the last
    step; without either, after the last step alone; `every_steps: 0`: never. SIGTERM asks a run to
    save at the end of its step and to end; it ends anyway after `sigterm_deadline_s`. No `dir` is
    `checkpoints` in the run's directory.
    """

    every_steps: Annotated[
        CountOrZero | None, Expected("null, or a whole number of at least 0")
    ] = None
    every_minutes: Annotated[Positive | None, Expected("null, or minutes above 0")] = None
    keep: Count = 2
    dir: Annotated[str | None, Field(min_length=1), Expected("null, or a folder")] = None
    on_sigterm: bool = True
    sigterm_deadline_s: Positive = 120.0

    @property
    def saves(self) -> bool:
        """Whether anything is ever saved."""
        return self.every_steps != 0

    @property
    def stop_within_s(self) -> float | None:
        """How long a run that is asked to end may take to save; None: it ends without."""
        return self.sigterm_deadline_s if self.saves and self.on_sigterm else None

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether the state is saved after so many steps of a run, whatever the time.

        Args:
            step: How many steps have been done.
            num_steps: How many the run has in all.
        """
        if not self.saves:
            return False
        return step == num_steps or (self.every_steps is not None and step % self.every_steps == 0)
