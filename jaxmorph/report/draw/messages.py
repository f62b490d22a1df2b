"""The messages in flight between a timeline's stages, by the links' delays."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxmorph.records import Link
from jaxmorph.schedule.costs import Links
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.replay import LinkModel, StageQueues, outgoing, stage_queues
from jaxmorph.schedule.timeline import Timeline, TransferIndex


class Message(NamedTuple):
    """The output of an F or a B in flight; times in milliseconds since the step's start."""

    sender: int
    receiver: int
    is_forward: bool
    sent_ms: float
    arrives_ms: float

    @property
    def link(self) -> Link:
        """The link between the two stages."""
        return Link(min(self.sender, self.receiver), max(self.sender, self.receiver))


def messages_in_flight(
    timeline: Timeline, links: Links, link_model: LinkModel = "latency"
) -> Iterator[Message]:
    """The messages over links with a delay, stage by stage.

    A message with a recorded arrival left the link's delay before it, since a transfer begins only
    when both ends are ready. Any other message leaves at the end of its op.
    """
    count, chunks = timeline.num_stages, num_chunks(timeline)
    directions = outgoing(links, count, chunks)
    queues = stage_queues(directions, link_model) or [StageQueues()] * count
    transfers = TransferIndex(timeline)
    for stage, op, _, end_ms in timeline.spans():
        is_forward = op.kind is OpKind.F
        virtual = op.chunk * count + stage + (1 if is_forward else -1)
        direction, queue = (
            (directions[stage].forward, queues[stage].forward)
            if is_forward
            else (directions[stage].backward, queues[stage].backward)
        )
        if op.kind is OpKind.W or not 0 <= virtual < count * chunks or not direction.total_ms:
            continue
        receiver = virtual % count
        _, received = transfers.ends_of(op.kind, op.chunk, op.microbatch, stage, receiver)
        if received is not None:
            sent_ms, arrives_ms = max(end_ms, received.end_ms - direction.total_ms), received.end_ms
        else:
            gets_link_ms = queue.enter(end_ms) if queue else end_ms
            sent_ms, arrives_ms = end_ms, gets_link_ms + direction.total_ms
        yield Message(stage, receiver, is_forward, sent_ms, arrives_ms)


def link_delays_ms(
    links: Links, num_stages: int, num_chunks: int = 1
) -> dict[Link, tuple[float, float]]:
    """The links with a delay: latency and occupancy together, lower to upper stage and back.

    With several chunks the link from the last stage to the first counts too.
    """
    directions = outgoing(links, num_stages, num_chunks)
    chain = {
        Link(stage, stage + 1): (
            directions[stage].forward.total_ms,
            directions[stage + 1].backward.total_ms,
        )
        for stage in range(num_stages - 1)
    }
    if num_chunks > 1 and num_stages > 2:
        around = directions[0].backward.total_ms, directions[-1].forward.total_ms
        chain[Link(0, num_stages - 1)] = around
    return {link: delays for link, delays in chain.items() if any(delays)}


def num_chunks(timeline: Timeline) -> int:
    """The number of chunks that a timeline's ops name."""
    return 1 + max((op.chunk for order in timeline.orders for op in order), default=0)
