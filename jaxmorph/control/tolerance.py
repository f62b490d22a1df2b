"""Whether the plan in force absorbs what a link has come to take."""

from typing import NamedTuple

from jaxmorph.control.verdicts import Verdict


class Absorption(NamedTuple):
    """Whether a delay changes anything.

    Attributes:
        absorbed: Whether the plan takes it up, so that there is nothing to do.
        reason: The numbers, as a sentence.
    """

    absorbed: bool
    reason: str


def absorbed(
    verdict: Verdict, tolerated_latency_ms: float, *, holds_queue: bool = False
) -> Absorption:
    """Compares a direction's latency with what the plan's slackness takes up.

    Source: Equation 1, which bounds the sum of a link's two directions. Here each direction alone
    must fit into half of it, so that the answer doesn't depend on the other one.

    Args:
        verdict: What detection says of the direction.
        tolerated_latency_ms: What `schedule.slackness.tolerated_latency_ms` gives for its link,
            with the costs and the warm-up forwards of the plan in force.
        holds_queue: Whether the link is direct. Then both ends' queues stand still for every
            message, and slackness takes up nothing.
    """
    link = f"link {verdict.source}>{verdict.destination}"
    takes = f"{link} takes {verdict.latency_ms:.1f} ms a message"
    if holds_queue:
        return Absorption(False, f"{takes} and holds both ends' queues: no slackness absorbs that")
    if verdict.latency_ms <= tolerated_latency_ms:
        return Absorption(True, f"{takes}, the plan absorbs {tolerated_latency_ms:.1f}")
    return Absorption(False, f"{takes}, the plan absorbs only {tolerated_latency_ms:.1f}")
