"""Probes of direct links: which are due, what is to be done once they are in time, what was found.

That messages are in time on the delegated route says little of the accelerators' own. So what takes
a link back to direct waits until messages over the direct link itself have been in time.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from jaxmorph.control.detector import Detector
from jaxmorph.control.events import Happening, of_probe
from jaxmorph.control.orchestrator import Decision, Situation, changed_routes
from jaxmorph.program.instructions import Transfer
from jaxmorph.records import Link

_PROBE_HOLDS = 8  # steps for which a probe is believed


@dataclass(frozen=True)
class Found:
    """What probes have found.

    Attributes:
        took_ms: What messages took on each link that was probed, each way.
        late: The links on which that is more than a healthy one takes.
    """

    took_ms: Mapping[Link, list[float]]
    late: frozenset[Link]

    def told(self) -> list[Happening]:
        """What happened, a link each."""
        probed = sorted(self.took_ms.items())
        return [of_probe(link, took_ms, link in self.late) for link, took_ms in probed]


def found_by(
    probes: Mapping[str, float], detector: Detector, failed: Collection[Link] = ()
) -> Found:
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
        usual = detector.usual(transfer.source, transfer.destination, is_held=True)
        if usual is not None and duration_ms > usual.threshold_ms:
            late.add(transfer.link)
    return Found(took_ms, frozenset(late))


@dataclass(frozen=True)
class ProvenLinks:
    """The direct links that a probe has found healthy.

    Attributes:
        until: The step from which on each is no longer believed to be.
    """

    until: Mapping[Link, int] = field(default_factory=dict)

    def note(self, found: Found, step: int) -> "ProvenLinks":
        """Believe what was found after a step, for some steps."""
        healthy = found.took_ms.keys() - found.late
        return ProvenLinks({**self.until, **dict.fromkeys(healthy, step + _PROBE_HOLDS)})

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


class Probes:
    """Keeps the one decision that waits for probes; several threads may use it under one lock."""

    def __init__(self) -> None:
        self._due: tuple[Link, ...] = ()
        self._awaited: tuple[Situation, Decision] | None = None
        self._proven = ProvenLinks()

    @property
    def are_awaited(self) -> bool:
        """Whether a decision waits for them."""
        return self._awaited is not None

    def unproven(self, situation: Situation, decision: Decision) -> tuple[Link, ...]:
        """The links that a decision takes back to direct, and no probe has found healthy."""
        return self._proven.unproven(situation, decision)

    def ask_for(self, links: tuple[Link, ...], situation: Situation, decision: Decision) -> None:
        """Have links probed for a decision, in place of any that were to be probed before."""
        self._due, self._awaited = links, (situation, decision)

    def take_due(self) -> tuple[Link, ...]:
        """The links to be probed now; each is asked for once."""
        links, self._due = self._due, ()
        return links

    def forget(self) -> None:
        """Wait for none any more, and have none sent: what they were for is done, or dropped."""
        self._due, self._awaited = (), None

    def note(self, found: Found, step: int) -> None:
        """Believe what was found, for some steps."""
        self._proven = self._proven.note(found, step)

    def disbelieve(self, links: Collection[Link]) -> None:
        """Forget what was found of links: their direct paths have failed since."""
        self._proven = self._proven.without(links)

    def take_proven(self) -> tuple[Situation, Decision] | None:
        """What waited, once all of its links were found well; then none of its probes is due.

        None if nothing waits, or some links are unproven: these were probes for something earlier.
        """
        awaited = self._awaited
        if awaited is None or self.unproven(*awaited):
            return None
        self.forget()
        return awaited
