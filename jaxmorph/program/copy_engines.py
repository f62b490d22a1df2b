"""When a rank's stashes are on their way to host memory and back, on paper."""

from dataclasses import dataclass, field

from jaxmorph.program.instructions import Buffer, BufferKind, Fetch, Offload
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.timeline import CopySpan


@dataclass
class CopyEngines:
    """A device's two copy engines, one for each direction, beside its queue of ops.

    Copies of a direction share its bandwidth: they follow one another.

    Args:
        offload_ms: What a copy to host memory takes, milliseconds.
        fetch_ms: What a copy back takes, milliseconds.
    """

    rank: int
    offload_ms: float
    fetch_ms: float
    spans: list[CopySpan] = field(default_factory=list)
    _gone_ms: dict[Buffer, float] = field(default_factory=dict)
    _back_ms: dict[Buffer, float] = field(default_factory=dict)
    _out_free_ms: float = 0.0
    _in_free_ms: float = 0.0

    def begin(self, step: Offload | Fetch, now_ms: float) -> None:
        """Add a copy to those of its direction.

        Args:
            now_ms: When the queue comes to it.
        """
        if isinstance(step, Offload):
            start_ms = max(now_ms, self._out_free_ms)
            self._out_free_ms = self._gone_ms[step.buffer] = start_ms + self.offload_ms
            self._note("offload", step.buffer, start_ms, self._out_free_ms)
            return
        waits = (self._gone_ms[stash] for stash in (step.buffer, step.after) if stash)
        start_ms = max(now_ms, self._in_free_ms, *waits)
        self._in_free_ms = self._back_ms[step.buffer] = start_ms + self.fetch_ms
        self._note("fetch", step.buffer, start_ms, self._in_free_ms)

    def gone_ms(self, stash: Buffer) -> float:
        """When a stash has left the device."""
        return self._gone_ms[stash]

    def back_ms(self, op: Op) -> float:
        """When the stash that an op reads is back; 0 where it has not been away."""
        if not self._back_ms or op.kind not in (OpKind.B, OpKind.BW):
            return 0.0
        return self._back_ms.get(Buffer(BufferKind.STASH, op.microbatch, op.chunk), 0.0)

    def _note(self, kind: str, stash: Buffer, start_ms: float, end_ms: float) -> None:
        span = CopySpan(self.rank, kind, stash.microbatch, stash.chunk, start_ms, end_ms)
        self.spans.append(span)
