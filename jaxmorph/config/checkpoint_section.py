"""The sections about saving a run's state and restarting after a failure."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from jaxmorph.config.compare_section import Compare
from jaxmorph.config.problems import Problem, mismatch
from jaxmorph.config.sections import Count, CountOrZero, Expected, NotNegative, Positive, Section

DEFAULT_MINUTES = 15.0


class Checkpoint(Section):
    """When a run's state is saved, and where; see docs/how-to/resume.md."""

    every_steps: Annotated[
        CountOrZero | None, Expected("null, or a whole number of at least 0")
    ] = None
    """Save after every N-th step and the last one; null: by minutes and after the last; 0: never. A
    failure costs the steps since the last save; a save costs a copy of the state to host memory."""

    every_minutes: Annotated[Positive | None, Expected("null, or minutes above 0")] = (
        DEFAULT_MINUTES
    )
    """Also save once this many minutes have passed since the last save began; null: never."""

    keep: Count = 2
    """Checkpoints to keep; the second one is for when the newest turns out damaged."""

    dir: Annotated[str | None, Field(min_length=1), Expected("null, or a folder")] = None
    """A folder that all ranks share; null: `checkpoints` in the run directory."""

    on_sigterm: Annotated[bool, Expected("true or false")] = True
    """On SIGTERM, SIGHUP and the first Ctrl-C, save at the end of the step before the run ends."""

    sigterm_deadline_s: Positive = 120.0
    """Seconds after the signal at which the run ends even without a save. The scheduler's grace
    period should be long enough for a step and a save."""

    @property
    def saves(self) -> bool:
        """Whether anything is ever saved."""
        return self.every_steps != 0

    @property
    def stop_within_s(self) -> float | None:
        """How long a run may take to save after such a signal; None: it ends without saving."""
        return self.sigterm_deadline_s if self.saves and self.on_sigterm else None

    def is_due(self, step: int, num_steps: int | None) -> bool:
        """Whether to save after `step` steps, apart from `every_minutes`.

        Args:
            num_steps: Of the whole run; None if a script decides.
        """
        if not self.saves:
            return False
        return step == num_steps or (self.every_steps is not None and step % self.every_steps == 0)


_MAX_DOUBLINGS = 60  # keeps the power finite; every wait is at its longest well before


class RestartPolicy(Section):
    """What happens when a rank fails; see docs/how-to/recover.md."""

    max_restarts: CountOrZero = 3
    """Restarts in a row from the same checkpoint; a newer checkpoint resets the count. 0: never."""

    backoff_s: NotNegative = 1.0
    """Seconds to wait before the first restart; the wait doubles before each further one."""

    longest_backoff_s: NotNegative = 60.0
    """The upper limit of the wait, in seconds."""

    from_start: Annotated[bool, Expected("true or false")] = False
    """Restart from step 0 if there is no checkpoint yet."""

    compilation_cache: Annotated[
        bool | Annotated[str, Field(min_length=1)], Expected("auto, true, false, or a folder")
    ] = "auto"
    """Where ranks keep compiled programs for later starts, of this run and of others: `auto` is the
    user's cache, `$JAXMORPH_CACHE_DIR` or `~/.cache/jaxmorph`; true is the run directory; false
    keeps none."""

    def wait_s(self, attempt: int) -> float:
        """How long to wait before a restart.

        Args:
            attempt: Counts restarts in a row from the same checkpoint, from 1.
        """
        doubled_s = self.backoff_s * 2.0 ** min(attempt - 1, _MAX_DOUBLINGS)
        return min(doubled_s, self.longest_backoff_s)


def restarting_problems(
    compare: Compare, checkpoint: Checkpoint, policy: RestartPolicy
) -> Iterator[Problem]:
    """Yields settings with which a comparison's restarting systems can't restart, or don't differ.

    Checkpoint and policy are those of each of its runs.
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
    keep = [system for system in compare.restarting if system != "restart-cold"]
    if policy.compilation_cache is False and keep:
        why = f"as compare.systems has {keep[0]}, which keeps what is compiled"
        expected = f"auto, true, or a folder, {why}"
        yield mismatch("restart_policy.compilation_cache", False, expected)


def _saves_before_the_end(compare: Compare, checkpoint: Checkpoint) -> bool:
    """Whether a run can have a checkpoint before it ends."""
    if checkpoint.every_minutes not in (None, DEFAULT_MINUTES):  # the default rarely passes before
        return checkpoint.saves
    return bool(checkpoint.every_steps) and checkpoint.every_steps < compare.steps
