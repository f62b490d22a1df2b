"""How often planning is tried again after it has failed, and when it is given up."""

from dataclasses import dataclass

_FIRST_WAIT_STEPS = 4
_MOST_RETRIES = 4


@dataclass(frozen=True)
class Retries:
    """The failures in a row, and what follows from them.

    After the first one planning is let be for four steps, after each further one for twice as long;
    for four if a link turns slow meanwhile. A success makes an end of the row. The fifth failure in
    a row is the last.

    Attributes:
        not_before: The first step after which to plan again.
        not_before_if_slow: Likewise, if a link has turned slow since plans were asked for last.
    """

    failures: int = 0
    not_before: int = 0
    not_before_if_slow: int = 0

    @property
    def are_over(self) -> bool:
        """Whether planning is given up."""
        return self.failures > _MOST_RETRIES

    def after_failure(self, step: int) -> "Retries":
        """What is left of them after another failure.

        Args:
            step: The last step that is known of.
        """
        wait_steps = _FIRST_WAIT_STEPS * 2**self.failures
        return Retries(self.failures + 1, step + wait_steps, step + _FIRST_WAIT_STEPS)

    def may_begin(self, step: int, *, has_turned_slow: bool) -> bool:
        """Whether to plan again, if there is reason to.

        Args:
            step: The last step that is known of.
            has_turned_slow: Whether a link has, since plans were asked for last.
        """
        return step >= (self.not_before_if_slow if has_turned_slow else self.not_before)

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
        sooner = ", sooner if a link turns slow" if wait_steps > _FIRST_WAIT_STEPS else ""
        return f"the plan in force stays, and planning is tried again in {wait_steps} steps{sooner}"
