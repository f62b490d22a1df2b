"""How a direction of a link comes from one state of health to another: the table and its words."""

from enum import StrEnum

from jaxmorph.control.verdicts import LinkHealth


class Sign(StrEnum):
    """What the messages of a direction, or their absence, have shown.

    Attributes:
        ROSE: So many in a row were late that chance doesn't do it.
        MOVED: As many in a row took clearly more, or less, than those before, and were late still.
        FELL: As many in a row were in time.
        HELD: They have been in time for several steps.
        FAILED: The direct path was given up, or is found down.
        SHIFTED: Delegated messages of a link without a direct path take clearly more, or less.
        RETURNED: Both ends have found the direct path up for many steps in a row.
        KNOWN: It was slow when the run was last at work.
    """

    ROSE = "rose"
    MOVED = "moved"
    FELL = "fell"
    HELD = "held"
    FAILED = "failed"
    SHIFTED = "shifted"
    RETURNED = "returned"
    KNOWN = "known"


TURNS: dict[tuple[LinkHealth, Sign], LinkHealth] = {
    (LinkHealth.HEALTHY, Sign.ROSE): LinkHealth.SLOW,
    (LinkHealth.HEALTHY, Sign.KNOWN): LinkHealth.SLOW,
    (LinkHealth.HEALTHY, Sign.FAILED): LinkHealth.DEAD,
    (LinkHealth.SLOW, Sign.MOVED): LinkHealth.SLOW,
    (LinkHealth.SLOW, Sign.FELL): LinkHealth.RECOVERING,
    (LinkHealth.SLOW, Sign.FAILED): LinkHealth.DEAD,
    (LinkHealth.DEAD, Sign.SHIFTED): LinkHealth.DEAD,
    (LinkHealth.DEAD, Sign.RETURNED): LinkHealth.RECOVERING,
    (LinkHealth.RECOVERING, Sign.ROSE): LinkHealth.SLOW,
    (LinkHealth.RECOVERING, Sign.HELD): LinkHealth.HEALTHY,
    (LinkHealth.RECOVERING, Sign.RETURNED): LinkHealth.HEALTHY,
    (LinkHealth.RECOVERING, Sign.FAILED): LinkHealth.DEAD,
}
"""What follows from a sign in a state; a pair that is not here changes nothing.

No message brings a dead link back, as all of them are delegated: only its path itself does. After
that messages say whether it has recovered, or, where none of them are watched, the path once more.
"""

SENTENCES: dict[Sign, str] = {
    Sign.ROSE: "is slow: {took} for {count} messages in a row, {threshold:.1f} is late",
    Sign.MOVED: "is slow by another amount: {took} for {count} messages in a row, was {before:.1f}",
    Sign.FELL: "is recovering: {took} for {count} messages in a row, was {before:.1f}",
    Sign.HELD: "is healthy again: {took} in the last of {steps} good steps",
    Sign.FAILED: "is dead: {detail}",
    Sign.SHIFTED: "is dead, and delegated messages take another time: {took} for {count} in a row, "
    "was {before:.1f}",
    Sign.RETURNED: "is back: {detail}",
    Sign.KNOWN: "is taken for slow, as when the run was last at work: {detail}",
}
"""What is said of a direction that a sign has turned; `took` names the messages' times."""
