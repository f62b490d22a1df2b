"""What is wrong with a schedule, as one word for its kind, one line, and the grid."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from jaxmorph.schedule.schedule import Schedule, ScheduleError

FaultKind = Literal["missing op", "bad order", "deadlock"]


@dataclass(frozen=True)
class Fault:
    """The first rule that a schedule breaks.

    Args:
        kind: ``missing op``, ``bad order`` (of a stage's own ops) or ``deadlock`` (between stages).
        reason: One line that names the stage, the op and the rule.
        grid: The schedule with the offending ops marked, as in ``>F3<``.
    """

    kind: FaultKind
    reason: str
    grid: str

    def to_json(self) -> dict[str, Any]:
        """The fault as a JSON object."""
        return asdict(self)


def find_fault(schedule: Schedule) -> Fault | None:
    """Finds the first rule that a schedule breaks.

    Returns:
        The fault; None when every op can run.
    """
    try:
        schedule.validate_rows()
    except ScheduleError as error:
        kind = "missing op" if error.reason.endswith("is missing") else "bad order"
        return Fault(kind, error.reason, error.grid)
    try:
        schedule.validate()
    except ScheduleError as error:
        return Fault("deadlock", error.reason, error.grid)
    return None
