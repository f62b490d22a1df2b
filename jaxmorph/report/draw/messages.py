"""Messages on their way between stages, as the link states say."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxmorph.records import Link
from jaxmorph.schedule.costs import Links
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.replay import LinkModel, StageQueues, outgoing, stage_queues
from jaxmorph.schedule.timeline import Timeline, TransferIndex


class Message(NamedTuple):
    """One F's or B's output on its way; times in milliseconds since the step's start."""

    sender: int
    receiver: int
    is_forward: bool
    sent_ms: float
    arrives_ms: float

    @property
    def link(self) -> Link:
        """The link it travels, whatever its direction."""
        return Link(min(self.sender, self.receiver), max(self.sender, self.receiver))


def messages_in_flight(
    timeline: Timeline, links: Links, link_model: LinkModel = "latency"
) -> Iterator[Message]:
    """What the stages of a timeline send over links that delay it.

    A message whose arrival was recorded is on its way for the link's delay before that, since its
    transfer begins when both ends are ready for it; any other from the end of its op.

    Args:
        timeline: When ops ran.
        links: State of the links, milliseconds.

    Yields:
        The messages, stage by stage.
    """
    count, chunks = timeline.num_stages, num_chunks(timeline)
    directions = outgoing(links, count, chunks)
    queues = stage_queues(directions, link_model) or [StageQueues()] * count
    transfers = TransferIndex(timeline)
    for stage, op, _, end_ms in timeline.spans():
        is_forward = op.kind is OpKind.F
        virtual = op.chunk * count + stage + (1 if is_forward else -1)
        way, queue = (
            (directions[stage].forward, queues[stage].forward)
            if is_forward
            else (directions[stage].backward, queues[stage].backward)
        )
        if op.kind is OpKind.W or not 0 <= virtual < count * chunks or not way.delay_ms:
            continue
        receiver = virtual % count
        _, landing = transfers.ends_of(op.kind, op.chunk, op.microbatch, stage, receiver)
        if landing is not None:
            sent_ms, arrives_ms = max(end_ms, landing.end_ms - way.delay_ms), landing.end_ms
        else:
            gets_link_ms = queue.enter(end_ms) if queue else end_ms
            sent_ms, arrives_ms = end_ms, gets_link_ms + way.delay_ms
        yield Message(stage, receiver, is_forward, sent_ms, arrives_ms)


def link_delays_ms(
    links: Links, num_stages: int, num_chunks: int = 1
) -> dict[Link, tuple[float, float]]:
    """The links that delay messages, and for how long each way.

    Args:
        links: State of the links, milliseconds.
        num_chunks: Virtual stages a stage runs; with several, the link around counts too.

    Returns:
        Latency and occupancy together, lower to upper stage and back, for each slow link.
    """
    directions = outgoing(links, num_stages, num_chunks)
    chain = {
        Link(stage, stage + 1): (
            directions[stage].forward.delay_ms,
            directions[stage + 1].backward.delay_ms,
        )
        for stage in range(num_stages - 1)
    }
    if num_chunks > 1 and num_stages > 2:
        around = directions[0].backward.delay_ms, directions[-1].forward.delay_ms
        chain[Link(0, num_stages - 1)] = around
    return {link: delays for link, delays in chain.items() if any(delays)}


def num_chunks(timeline: Timeline) -> int:
    """Virtual stages a stage runs: as many as its ops name."""
    return 1 + max((op.chunk for order in timeline.orders for op in order), default=0)
