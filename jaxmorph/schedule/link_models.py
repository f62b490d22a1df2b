"""How links delay messages: each by its latency, or one waiting for another.

A stage's ops end one after another, and each direction of a link has one sender, so messages enter
their queue in the sender's execution order: no events need sorting.
"""

from typing import Literal, NamedTuple, get_args

from jaxmorph.schedule.costs import Link, Links, LinkState, neighbour_links

LinkModel = Literal["latency", "serialized"]
"""``latency``: a message occupies its link direction for the occupancy only, so that without any
messages overlap. ``serialized``: for its latency too, so that one message moves at a time."""


class Direction(NamedTuple):
    """One direction of a link, as its sender sees it."""

    latency_ms: float
    occupancy_ms: float

    @property
    def delay_ms(self) -> float:
        """From when a message gets the link until it has arrived."""
        return self.occupancy_ms + self.latency_ms


class StageDirections(NamedTuple):
    """The directions in which one stage sends, up the pipeline (F) and down it (B)."""

    forward: Direction
    backward: Direction


class LinkQueue:
    """The messages of one direction that wait for each other, one place for as long as each takes.

    Args:
        occupancy: How long a message keeps the next one waiting.
    """

    __slots__ = ("_free_at", "_occupancy")

    def __init__(self, occupancy: float) -> None:
        self._occupancy = occupancy
        self._free_at = 0.0

    def enter(self, at: float) -> float:
        """When a message that is there ``at`` a time gets the link: no earlier than those before.

        Args:
            at: When the message can be sent, not before the last one that entered.

        Returns:
            When it starts to occupy the link.
        """
        start = max(at, self._free_at)
        self._free_at = start + self._occupancy
        return start


class StageQueues(NamedTuple):
    """The queues of one stage's messages, up and down; None where none waits for another."""

    forward: LinkQueue | None = None
    backward: LinkQueue | None = None


def outgoing(links: Links, num_stages: int, num_chunks: int = 1) -> list[StageDirections]:
    """The directions in which each stage sends.

    Args:
        links: State of the links, milliseconds.
        num_chunks: Number of virtual stages each runs. With more than one, the last stage's
            activations go down link 0-(S-1) to the first stage, and its gradients come up it.

    Returns:
        One record per stage; a way that leads nowhere, or to the stage itself, delays nothing.

    Raises:
        ValueError: A link names a stage that does not exist.
    """
    chain = neighbour_links(links, num_stages)
    wraps = num_chunks > 1 and num_stages > 1
    around = links.get(Link(0, num_stages - 1), LinkState()) if wraps else LinkState()
    forward = [*map(_upwards, chain), _downwards(around)]
    backward = [_upwards(around), *map(_downwards, chain)]
    return [StageDirections(*ways) for ways in zip(forward, backward, strict=True)]


def stage_queues(
    directions: list[StageDirections], link_model: LinkModel
) -> list[StageQueues] | None:
    """Fresh queues for each stage's messages.

    Returns:
        One record per stage, the same queue wherever the way is the same (on two stages, the
        first one's up is its way around too); None when no message waits for another.

    Raises:
        ValueError: No such link model.
    """
    if link_model not in get_args(LinkModel):
        raise ValueError(f"link_model: got {link_model!r}, expected 'latency' or 'serialized'")
    last = len(directions) - 1
    queues: dict[tuple[int, int], LinkQueue] = {}

    def queue(sender: int, receiver: int, direction: Direction) -> LinkQueue | None:
        serialized = link_model == "serialized"
        occupancy = direction.delay_ms if serialized else direction.occupancy_ms
        return queues.setdefault((sender, receiver), LinkQueue(occupancy)) if occupancy else None

    stages = [
        StageQueues(
            queue(stage, stage + 1 if stage < last else 0, ways.forward),
            queue(stage, stage - 1 if stage else last, ways.backward),
        )
        for stage, ways in enumerate(directions)
    ]
    return stages if queues else None


def _upwards(state: LinkState) -> Direction:
    return Direction(state.forward_latency_ms, state.forward_occupancy_ms)


def _downwards(state: LinkState) -> Direction:
    return Direction(state.backward_latency_ms, state.backward_occupancy_ms)
