"""The section of a configuration that says when a run saves its state, and where."""

from typing import Annotated

from pydantic import Field

from jaxmorph.config.sections import Count, CountOrZero, Expected, Section


class Checkpoint(Section):
    """After which steps a run's state is saved, how many checkpoints are kept, and where.

    After every N-th step and the last one; null: after the last one alone; 0: never. No `dir` is
    `checkpoints` in the run's directory.
    """

    every_steps: Annotated[
        CountOrZero | None, Expected("null, or a whole number of at least 0")
    ] = None
    keep: Count = 2
    dir: Annotated[str | None, Field(min_length=1), Expected("null, or a folder")] = None

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether the state is saved after so many steps of a run.

        Args:
            step: How many steps have been done.
            num_steps: How many the run has in all.
        """
        if self.every_steps == 0:
            return False
        return step == num_steps or (self.every_steps is not None and step % self.every_steps == 0)
