"""The sections that say when a run is saved and whether it is started again after a failure."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from jaxmorph.config.compare_section import Compare
from jaxmorph.config.problems import Problem, mismatch
from jaxmorph.config.sections import Count, CountOrZero, Expected, NotNegative, Positive, Section


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

    def is_due(self, step: int, num_steps: int | None) -> bool:
        """Whether the state is saved after so many steps of a run, whatever the time.

        Args:
            step: How many steps have been done.
            num_steps: How many the run has in all; None: as many as a script takes.
        """
        if not self.saves:
            return False
        return step == num_steps or (self.every_steps is not None and step % self.every_steps == 0)


_MOST_DOUBLINGS = 60  # beyond that any wait has long been the longest


class RestartPolicy(Section):
    """How often a run is started again from its last checkpoint, and how long it waits before.

    `max_restarts` counts restarts in a row from one checkpoint: one that comes to a newer
    checkpoint begins the count anew; 0: never. Each of them waits twice as long as the one before,
    from `backoff_s` up to `longest_backoff_s`. Without a checkpoint a run is started again only if
    `from_start` says so. `compilation_cache` is where the ranks of a run that may be started again
    keep what they have compiled: true is `compilation_cache` in the run's directory.
    """

    max_restarts: CountOrZero = 3
    backoff_s: NotNegative = 1.0
    longest_backoff_s: NotNegative = 60.0
    from_start: Annotated[bool, Expected("true or false")] = False
    compilation_cache: Annotated[
        bool | Annotated[str, Field(min_length=1)], Expected("true, false, or a folder")
    ] = True

    def wait_s(self, attempt: int) -> float:
        """How long to wait before a restart.

        Args:
            attempt: Which one in a row from the same checkpoint, from 1.
        """
        doubled_s = self.backoff_s * 2.0 ** min(attempt - 1, _MOST_DOUBLINGS)
        return min(doubled_s, self.longest_backoff_s)


def restarting_problems(
    compare: Compare, checkpoint: Checkpoint, policy: RestartPolicy
) -> Iterator[Problem]:
    """What keeps systems of a comparison from restarting, or from what tells them apart.

    Args:
        checkpoint: When each of its runs is saved.
        policy: When each of its runs is started again.
    """
    if not compare.restarting:
        return
    why = f"as compare.systems has {compare.restarting[0]}"
    if policy.max_restarts == 0:
        yield mismatch("restart_policy.max_restarts", 0, f"at least 1, {why}")
    if not (policy.from_start or _saves_before_the_end(compare, checkpoint)):
        steps = f"less than compare.steps, which is {compare.steps}"
        expected = f"a number of steps above 0 and {steps}, {why} (or checkpoint.every_minutes)"
        yield mismatch("checkpoint.every_steps", checkpoint.every_steps, expected)
    if policy.compilation_cache is False and "restart" in compare.restarting:
        expected = "true, or a folder, as compare.systems has restart, which keeps what is compiled"
        yield mismatch("restart_policy.compilation_cache", False, expected)


def _saves_before_the_end(compare: Compare, checkpoint: Checkpoint) -> bool:
    """Whether a run may have a checkpoint to go on from before it is over."""
    if checkpoint.every_minutes is not None:
        return checkpoint.saves
    return bool(checkpoint.every_steps) and checkpoint.every_steps < compare.steps
