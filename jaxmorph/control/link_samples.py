"""What each message of a measured step took on its link, apart from what its ends waited for."""

from functools import lru_cache
from typing import NamedTuple

from jaxmorph.program.instructions import Payload, Transfer
from jaxmorph.schedule.timeline import Timeline, TransferSpan


class LinkSample(NamedTuple):
    """What one message took.

    Attributes:
        source: The rank that sent it.
        destination: The rank that received it.
        duration_ms: How long the link took, milliseconds.
        at_ms: When it was over, by the receiver's clock, milliseconds since the step began.
        is_held: Whether it was a direct transfer, which holds both ends' queues.
    """

    source: int
    destination: int
    microbatch: int
    duration_ms: float
    at_ms: float
    is_held: bool

    @property
    def sent_ms(self) -> float:
        """When the link had it, by the same clock."""
        return self.at_ms - self.duration_ms


def link_samples(timeline: Timeline) -> tuple[LinkSample, ...]:
    """One sample for each message of activations or gradients, in the order of sending.

    Both ends hold a direct transfer from when they reach it until it is over. The end that came
    later waited for nobody, so the smaller of the two durations is the link's alone: neither a slow
    stage nor a transfer before it, which kept one of the ends, is in it. A delegated message is its
    receiver's alone, from when it was sent until it landed, whenever it is looked for.

    Tied gradients are left out: they are of another length, and sent after the last op. So are
    messages that one end has not reported.

    Args:
        timeline: A measured step, or one simulated with its transfers.
    """
    received: list[LinkSample] = []
    other_end: dict[str, TransferSpan] = {}
    for span in timeline.transfers:
        transfer = _parse(span.label)
        if transfer.payload is Payload.TIED:
            continue
        duration_ms, receiver = span.end_ms - span.start_ms, span
        if span.holds_queue:
            met = other_end.pop(span.label, None)
            if met is None:
                other_end[span.label] = span
                continue
            duration_ms = min(duration_ms, met.end_ms - met.start_ms)
            receiver = span if span.stage == transfer.destination else met
        if receiver.stage == transfer.destination:
            ends = transfer.source, transfer.destination, transfer.microbatch
            received.append(LinkSample(*ends, duration_ms, receiver.end_ms, span.holds_queue))
    received.sort(key=_when)
    return tuple(received)


def _when(sample: LinkSample) -> tuple[float, float]:
    return sample.at_ms - sample.duration_ms, sample.at_ms


_parse = lru_cache(maxsize=1 << 14)(Transfer.parse)  # the same labels come step by step
