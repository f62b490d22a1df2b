"""Which recorded transfer carried which op's output."""

import re

from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.timeline import Timeline, TransferSpan

_LABEL = re.compile(r"(?:(\d+)\.)?(activation|gradient)\[(\d+)\] (\d+)>(\d+)")
_Message = tuple[str, int, int, int, int]  # payload, chunk, microbatch, source, destination


class TransferIndex:
    """The transfers of a timeline, by the stage that took part and by what they carried.

    Args:
        timeline: A measured step, or one simulated with its transfers. Labels are those of lowered
            programs, such as ``1.activation[3] 0>1`` for what F of chunk 1 made of microbatch 3.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._of_stage: list[list[TransferSpan]] = [[] for _ in timeline.orders]
        self._carrying: dict[tuple[int, _Message], TransferSpan] = {}
        for span in timeline.transfers:
            self._of_stage[span.stage].append(span)
            if found := _LABEL.fullmatch(span.label):
                chunk, payload, *numbers = found.groups()
                microbatch, source, destination = map(int, numbers)
                message = (payload, int(chunk or 0), microbatch, source, destination)
                self._carrying[span.stage, message] = span

    def during(self, stage: int, start_ms: float, end_ms: float) -> list[TransferSpan]:
        """The stage's transfers that run at some time between the two."""
        spans = self._of_stage[stage]
        return [span for span in spans if span.start_ms < end_ms and span.end_ms > start_ms]

    def ends_of(
        self, kind: OpKind, chunk: int, microbatch: int, source: int, destination: int
    ) -> tuple[TransferSpan | None, TransferSpan | None]:
        """The sender's and the receiver's part in the transfer of one op's output.

        Args:
            kind: The op that made it: F, or a backward.
            destination: The stage that takes it.

        Returns:
            Both spans; None for an end that was not recorded.
        """
        payload = "activation" if kind is OpKind.F else "gradient"
        message = (payload, chunk, microbatch, source, destination)
        sending, receiving = (self._carrying.get((at, message)) for at in (source, destination))
        return sending, receiving
