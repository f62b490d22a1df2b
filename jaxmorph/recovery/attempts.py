"""Whether a failed run is started again: how often it has been in vain."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attempts:
    """Restarts in a row that brought the run no further.

    Attributes:
        count: How many, the last one included; 0: there has been none.
        from_step: The step that they went on from.
    """

    count: int = 0
    from_step: int = -1

    def again(self, from_step: int) -> "Attempts":
        """With one more; a newer checkpoint begins the count anew.

        Args:
            from_step: The step that it goes on from.
        """
        came_further = from_step > self.from_step
        return Attempts(1 if came_further else self.count + 1, from_step)
