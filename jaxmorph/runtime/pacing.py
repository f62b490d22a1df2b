"""How long ops last on the accelerator that a paced queue stands for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxmorph.schedule.ops import OpKind


@dataclass(frozen=True)
class Pace:
    """Durations of one stage's ops; an empty pace leaves ops as long as they take.

    Attributes:
        duration_s: Seconds per kind of op.
        host_copy_bytes_per_s: How fast the accelerator copies to host memory, and back; None: as
            fast as it does here.
    """

    duration_s: Mapping[OpKind, float] = field(default_factory=dict)
    host_copy_bytes_per_s: float | None = None

    @classmethod
    def of_stage(
        cls,
        forward_ms: float,
        backward_input_ms: float,
        backward_weight_ms: float,
        num_chunks: int = 1,
    ) -> "Pace":
        """The pace of a stage whose ops last this long; a full backward lasts as both its parts.

        An op of one of several chunks lasts its share of the stage's time.
        """
        stage_ms = {
            OpKind.F: forward_ms,
            OpKind.B: backward_input_ms,
            OpKind.W: backward_weight_ms,
            OpKind.BW: backward_input_ms + backward_weight_ms,
        }
        return cls({kind: time_ms / num_chunks / 1000 for kind, time_ms in stage_ms.items()})

    def of(self, kind: OpKind) -> float | None:
        """Seconds that an op of this kind lasts, or None: as long as it takes."""
        return self.duration_s.get(kind)
