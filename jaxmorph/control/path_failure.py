"""What is known of a link whose direct path was given up in the middle of a step."""

from dataclasses import asdict, dataclass
from typing import Any

from jaxmorph.schedule.costs import Link


@dataclass(frozen=True)
class PathFailure:
    """That a link went over from its direct path to hosts, by all that its ends have told.

    What one of them saw is the runtime's `LinkFailure`.

    Attributes:
        detail: What failed, after how long, in one line.
        held_up_s: How long that held up the queue of the end that it held up longer, seconds.
        resent: How many messages both ends sent again.
        began: Whether an end had begun with the transfer that failed.
        lives_left: How often the direct path can begin again while these processes live; None
            where that isn't known.
        told_by: The ranks that tell it: both ends, or one alone.
    """

    link: Link
    detail: str
    held_up_s: float = 0.0
    resent: int = 0
    began: bool = False
    lives_left: int | None = None
    told_by: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The failure as a JSON object, with the link as `"2-3"`."""
        return {**asdict(self), "link": str(self.link)}
