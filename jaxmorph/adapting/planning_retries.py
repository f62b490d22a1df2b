"""How often planning is tried again after it has failed, and when it is given up."""

from dataclasses import dataclass

_FIRST_WAIT_STEPS = 4
_MOST_RETRIES = 4


@dataclass(frozen=True)
class Retries:
    """The failures in a row, and what follows from them.

    After the first one planning is let be for four steps, after each further one for twice as long.
    A success makes an end of the row. The fifth failure in a row is the last.

    Attributes:
        failures: How many there were.
        not_before: The first step after which to plan again.
    """

    failures: int = 0
    not_before: int = 0

    @property
    def are_over(self) -> bool:
        """Whether planning is given up."""
        return self.failures > _MOST_RETRIES

    def after_failure(self, step: int) -> "Retries":
        """What is left of them after another failure.

        Args:
            step: The last step that is known of.
        """
        return Retries(self.failures + 1, step + _FIRST_WAIT_STEPS * 2**self.failures)

    def in_words(self, step: int) -> str:
        """What happens next, after a failure.

        Args:
            step: The last step that is known of.
        """
        if self.are_over:
            return (
                f"that was attempt {self.failures} in a row: planning is given up, and the plan in "
                "force stays for the rest of the run"
            )
        wait_steps = self.not_before - step
        return f"the plan in force stays, and planning is tried again in {wait_steps} steps"
