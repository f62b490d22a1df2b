"""What a rank tells of a direct path that has failed."""

from dataclasses import dataclass
from typing import Any

from jaxmorph.schedule.costs import Link


@dataclass(frozen=True)
class LinkFailure:
    """A switch as one end saw it.

    Attributes:
        held_up_s: How long this rank's queue had been held up by the transfer that failed.
        resent: How many messages this end has sent again.
        began: Whether the collective of the transfer had begun here, and failed.
    """

    link: Link
    detail: str
    held_up_s: float
    resent: int
    began: bool

    def to_message(self, lives_left: int) -> dict[str, Any]:
        """What the others are told.

        Args:
            lives_left: How often the link can still begin on its direct route.
        """
        return {
            "link": str(self.link),
            "detail": self.detail,
            "held_up_s": self.held_up_s,
            "resent": self.resent,
            "began": self.began,
            "lives_left": lives_left,
        }
