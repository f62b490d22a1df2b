"""Probes of direct links: what they have found, and what has not been probed.

That messages are in time on the delegated route says little of the accelerators' own. So what takes
a link back to direct waits until messages over the direct link itself have been in time.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from jaxmorph.control.detector import Detector
from jaxmorph.control.events import ControlEvent, probe_event
from jaxmorph.control.orchestrator import Decision, Situation, changed_routes
from jaxmorph.program.instructions import Transfer
from jaxmorph.records import Link

_TRUSTED_STEPS = 8  # steps for which a probe is believed


@dataclass(frozen=True)
class ProbeResults:
    """What probes have found.

    Attributes:
        took_ms: What messages took on each link that was probed, each way.
        late: The links on which that is more than a healthy one takes.
    """

    took_ms: Mapping[Link, list[float]]
    late: frozenset[Link]

    def events(self) -> tuple[ControlEvent, ...]:
        """One for each link."""
        probed = sorted(self.took_ms.items())
        return tuple(probe_event(link, took_ms, link in self.late) for link, took_ms in probed)


def probe_results(
    probes: Mapping[str, float], detector: Detector, failed: Collection[Link] = ()
) -> ProbeResults:
    """What probes have found.

    Args:
        probes: What their messages took, milliseconds, by their names.
        failed: The links whose direct paths have failed: what came of a probe says nothing of them.
    """
    took_ms: dict[Link, list[float]] = {}
    late: set[Link] = set()
    for label, duration_ms in probes.items():
        transfer = Transfer.parse(label)
        if transfer.link in failed:
            continue
        took_ms.setdefault(transfer.link, []).append(duration_ms)
        usual = detector.usual(transfer.source, transfer.destination, is_direct=True)
        if usual is not None and duration_ms > usual.threshold_ms:
            late.add(transfer.link)
    return ProbeResults(took_ms, frozenset(late))


@dataclass(frozen=True)
class ProvenLinks:
    """The direct links that a probe has found healthy.

    Attributes:
        until: The step from which on each is no longer believed to be.
    """

    until: Mapping[Link, int] = field(default_factory=dict)

    def record(self, found: ProbeResults, step: int) -> "ProvenLinks":
        """Believe what was found after a step, for some steps."""
        healthy = found.took_ms.keys() - found.late
        return ProvenLinks({**self.until, **dict.fromkeys(healthy, step + _TRUSTED_STEPS)})

    def without(self, links: Collection[Link]) -> "ProvenLinks":
        """Forget what was found of links: their direct paths have failed since."""
        return ProvenLinks({link: step for link, step in self.until.items() if link not in links})

    def unproven(self, situation: Situation, decision: Decision) -> tuple[Link, ...]:
        """The links that a decision takes back to direct, and no probe has found healthy."""
        if decision.chosen is None:
            return ()
        then = situation.candidates[decision.chosen].routes
        back = changed_routes(situation.in_force.routes, then).items()
        return tuple(
            link
            for link, route in sorted(back)
            if route == "direct"
            and link.upper == link.lower + 1
            and situation.step >= self.until.get(link, 0)
        )
