"""The section of a configuration that says whether a run whose ranks fail is started again."""

from typing import Annotated

from pydantic import Field

from jaxmorph.config.sections import CountOrZero, Expected, NotNegative, Section

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
