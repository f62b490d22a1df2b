"""The messages in flight between a timeline's stages, by the links' delays."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxmorph.placement import Place, Placement
from jaxmorph.records import Link
from jaxmorph.schedule.costs import Links
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.replay import (
    LinkModel,
    StageQueues,
    direction_delay,
    outgoing,
    stage_queues,
)
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
        return Link.of(self.sender, self.receiver)


def messages_in_flight(
    timeline: Timeline, links: Links, link_model: LinkModel = "latency"
) -> Iterator[Message]:
    """The messages over links with a delay, stage by stage.

    A message with a recorded arrival leaves one link delay before that, because a transfer begins
    only when both ends are ready. Any other message leaves at the end of its op.
    """
    placement = timeline.placement
    directions = outgoing(links, placement)
    queues = stage_queues(directions, placement, link_model)
    queues = queues or [StageQueues()] * placement.num_virtual_stages
    transfers = TransferIndex(timeline)
    for stage, op, _, end_ms in timeline.spans():
        is_forward = op.kind is OpKind.F
        here = Place(stage, op.chunk)
        virtual = placement.virtual_stage(here)
        receiving, direction, queue = (
            (placement.after(here), directions[virtual].forward, queues[virtual].forward)
            if is_forward
            else (placement.before(here), directions[virtual].backward, queues[virtual].backward)
        )
        if op.kind is OpKind.W or receiving is None or not direction.total_ms:
            continue
        receiver = receiving.rank
        _, received = transfers.ends_of(op.kind, op.chunk, op.microbatch, stage, receiver)
        if received is not None:
            sent_ms, arrives_ms = max(end_ms, received.end_ms - direction.total_ms), received.end_ms
        else:
            gets_link_ms = queue.enter(end_ms) if queue else end_ms
            sent_ms, arrives_ms = end_ms, gets_link_ms + direction.total_ms
        yield Message(stage, receiver, is_forward, sent_ms, arrives_ms)


def link_delays_ms(links: Links, placement: Placement) -> dict[Link, tuple[float, float]]:
    """The links with a delay: latency and occupancy together, lower to upper stage and back."""
    delays = {
        link: (
            direction_delay(links, link.lower, link.upper).total_ms,
            direction_delay(links, link.upper, link.lower).total_ms,
        )
        for link in placement.links
    }
    return {link: both for link, both in delays.items() if any(both)}
