"""The results of probes of direct links, and which links still need one.

Delegated messages that are in time say little about the direct route. So a link goes back to its
direct route only after messages over the direct route itself have been in time.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from jaxmorph.control.detector import Detector
from jaxmorph.control.events import ControlEvent, probe_event
from jaxmorph.control.orchestrator import Decision, Situation, changed_routes
from jaxmorph.program.instructions import Transfer
from jaxmorph.records import Link

_TRUSTED_STEPS = 8  # a probe's result is valid for so many


@dataclass(frozen=True)
class ProbeResults:
    """The results of probes.

    Attributes:
        took_ms: The times of messages on each probed link, in each direction.
        late: The links with a message that took longer than on a healthy link.
    """

    took_ms: Mapping[Link, list[float]]
    late: frozenset[Link]

    def events(self) -> tuple[ControlEvent, ...]:
        """One event for each link."""
        probed = sorted(self.took_ms.items())
        return tuple(probe_event(link, took_ms, link in self.late) for link, took_ms in probed)


def probe_results(
    probes: Mapping[str, float], detector: Detector, failed: Collection[Link] = ()
) -> ProbeResults:
    """The results of probes.

    Args:
        probes: The times of their messages, milliseconds, by the names of transfers.
        failed: Links whose direct paths have failed since; their messages may have been delegated.
    """
    took_ms: dict[Link, list[float]] = {}
    late: set[Link] = set()
    for label, duration_ms in probes.items():
        transfer = Transfer.parse(label)
        if transfer.link in failed:
            continue
        took_ms.setdefault(transfer.link, []).append(duration_ms)
        usual = detector.usual((transfer.source, transfer.destination), is_direct=True)
        if usual is not None and duration_ms > usual.threshold_ms:
            late.add(transfer.link)
    return ProbeResults(took_ms, frozenset(late))


@dataclass(frozen=True)
class ProvenLinks:
    """The direct links that a probe has found healthy.

    Attributes:
        until: The first step for which each result is no longer valid.
    """

    until: Mapping[Link, int] = field(default_factory=dict)

    def record(self, results: ProbeResults, step: int) -> "ProvenLinks":
        """Add the results of probes after a step."""
        healthy = results.took_ms.keys() - results.late
        return ProvenLinks({**self.until, **dict.fromkeys(healthy, step + _TRUSTED_STEPS)})

    def without(self, links: Collection[Link]) -> "ProvenLinks":
        """Forget links whose direct paths have failed since."""
        return ProvenLinks({link: step for link, step in self.until.items() if link not in links})

    def unproven(self, situation: Situation, decision: Decision) -> tuple[Link, ...]:
        """The links that a decision takes back to direct and that still need a probe."""
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
