"""The part on messages in both directions at once, copied as runs do: what computation loses."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax

from jaxmorph.gpu_check.child_process import Told
from jaxmorph.gpu_check.copy_parts import ask_on
from jaxmorph.gpu_check.disturbance import Disturbance
from jaxmorph.gpu_check.report import Row
from jaxmorph.gpu_check.settings import CheckSettings
from jaxmorph.gpu_check.tier_found import disturbance_rows

_CHILD = "jaxmorph.gpu_check.both_ways_child"


@dataclass(frozen=True)
class BothWaysReport:
    """What computation loses beside messages that leave and messages that arrive.

    Attributes:
        platform: Where it computes; nothing is asked of a CPU.
        outgoing: How messages are copied into slots.
        disturbance: What it loses; None if that was not found out.
        trouble: Why not; empty if it was.
    """

    platform: str
    outgoing: str = ""
    incoming: str = ""
    disturbance: Disturbance | None = None
    trouble: str = ""

    def rows(self) -> Iterator[Row]:
        """A row for each kind of traffic."""
        if self.disturbance is None:
            yield Row("both ways", "doesn't work", self.trouble, False)
            return
        yield Row("into slots by", self.outgoing)
        yield Row("out of slots by", self.incoming)
        asked = self.platform != "cpu"
        yield from disturbance_rows("both ways", self.disturbance, is_asked=asked)


def measure_both_ways(settings: CheckSettings) -> BothWaysReport:
    """What computation loses beside messages in both directions.

    Args:
        settings: For how long their process may run.
    """
    device = jax.devices()[0]
    limit_s = min(settings.copies.child_s, settings.left_s)
    return both_ways_of(device.platform, ask_on(device, _CHILD, [], limit_s))


def both_ways_of(platform: str, told: Told) -> BothWaysReport:
    """What the process says that has messages go both ways.

    Args:
        platform: Where it computes.
    """
    if told.trouble or not told.lines:
        return BothWaysReport(platform, trouble=told.trouble or "its process told nothing")
    found = dict(told.lines[-1])
    disturbance = Disturbance(**found.pop("disturbance"))
    return BothWaysReport(platform, disturbance=disturbance, **found)
