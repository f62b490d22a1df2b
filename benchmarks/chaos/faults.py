"""The kinds of faults, which of them a run has next, and when its links fail."""

import csv
import io
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

QUIET_STEPS = 30  # before the last step nothing fails any more: that state must be saved
TRACE_S = 900.0
FIRST_STEP = 4
STORAGE_STEPS = (6, 9)  # with a save after every fifth step each of them meets one
NO_ROOM = "No space left on device"
_COLUMNS = ("time_s", "links", "latency_ms", "bandwidth_mbps", "jitter_ms", "cut", "route")
_DEAD_CARD_EVERY_S = 10.0
_LAST_S = {"link cut": (0.2, 0.8), "card down": (2.5, 5.0)}
_Card = TypeVar("_Card")

Ends = Literal["nothing", "ranks", "command"]
Moment = Literal["at any time", "start", "save", "morph", "failover"]
MOMENTS: tuple[Moment, ...] = ("at any time", "start", "save", "morph", "failover")


@dataclass(frozen=True)
class Kind:
    """What one kind of fault is, and what follows.

    Attributes:
        named: A pattern of what names its cause: an event's `kind: detail`, or a line of a log or
            of the terminal; {rank} is its rank. Empty: it only slows the run down, and need not be
            named.
        ends: What ends with it: the ranks, which the command restarts; or the command, which is
            restarted with `--resume auto`.
        lasts_s: The shortest and the longest time until it is undone; zeros: it stays.
    """

    named: str
    ends: Ends = "nothing"
    lasts_s: tuple[float, float] = (0.0, 0.0)


KINDS: Mapping[str, Kind] = {
    "rank killed": Kind("^rank_failed: rank {rank} failed: ended by SIGKILL", "ranks"),
    "rank stopped for ever": Kind("^rank_failed: rank {rank} failed: stalled: ", "ranks"),
    "queue never ends": Kind(
        "^rank_failed: rank {rank} failed: stalled: .*its queue is at ", "ranks"
    ),
    "rank stopped": Kind("", lasts_s=(0.05, 0.8)),
    "sidecar killed": Kind("^sidecar_restarted: "),
    "sidecar stopped": Kind("", lasts_s=(0.05, 0.8)),
    "sidecar stopped for ever": Kind("^sidecar_restarted: .*no sign of life"),
    "planning killed": Kind("^planning_failed: "),
    "planning stopped": Kind("", lasts_s=(0.5, 3.0)),
    "card resets connections": Kind("^lane_(down|closed): ", lasts_s=(0.2, 3.0)),
    "storage failing": Kind("^checkpoint_failed: "),
    "disk full": Kind(NO_ROOM),
    "launcher killed": Kind("", "command"),
    "everything killed": Kind("", "command"),
    "files damaged": Kind(
        "^files_damaged: |^checkpoint_damaged: |compiled again|programs are compiled", "command"
    ),
}
"""The kinds of faults that processes and files have."""

LINK_KINDS = ("link slow", "link narrow", "link unsteady", "link cut", "card down")
"""The kinds of faults that links have; they come by time, beside the others."""
CUTS = ("link cut", "card down")  # emulated ones hold until the command restarts its ranks


class Deck(Generic[_Card]):
    """Deals cards in random order, and each of them once before any comes again."""

    def __init__(self, cards: Sequence[_Card], rng: random.Random) -> None:
        self._cards, self._rng = list(cards), rng
        self._left: list[_Card] = []

    def deal(self) -> _Card:
        """The next card."""
        if not self._left:
            self._left = self._rng.sample(self._cards, len(self._cards))
        return self._left.pop()


class Dealer:
    """Chooses the faults of all runs.

    Args:
        needed: How many of each kind are needed; no other kind is chosen.
    """

    def __init__(self, rng: random.Random, needed: Mapping[str, int]) -> None:
        self.needed, self.counts, self._rng = needed, Counter[str](), rng
        moments = {True: [each for each in MOMENTS if each != "failover"], False: MOMENTS}
        self._moments = {key: Deck(cards, rng) for key, cards in moments.items()}

    def missing(self, kinds: Iterable[str] | None = None) -> dict[str, int]:
        """How many of each kind are still needed, of those that are."""
        kinds = self.needed if kinds is None else kinds
        left = {kind: self.needed.get(kind, 0) - self.counts[kind] for kind in kinds}
        return {kind: number for kind, number in left.items() if number > 0}

    def deal(self, *, ranks_end: bool) -> str | None:
        """The next kind for a run in which ranks may end, or may not; None: there is none.

        A kind is the likelier the more are missing. Once none is, those come that end nothing.
        """
        kinds = [
            name
            for name, kind in KINDS.items()
            if name in self.needed and (ranks_end or kind.ends != "ranks")
        ]
        missing = self.missing(kinds)
        if missing:
            return self._rng.choices([*missing], [*missing.values()])[0]
        quick = [name for name in kinds if KINDS[name].ends == "nothing"]
        return self._rng.choice(quick or kinds) if kinds else None

    def ranks_may_end(self) -> bool:
        """Whether ranks end in the next run; else cards go down and links are cut in it."""
        ending = [name for name, kind in KINDS.items() if kind.ends == "ranks"]
        ending, cuts = ([name for name in each if name in self.needed] for each in (ending, CUTS))
        if not ending or not cuts:
            return bool(ending)
        most = [max(self.missing(each).values(), default=0) for each in (ending, cuts)]
        return most[0] >= most[1]

    def moment(self, *, ranks_end: bool) -> Moment:
        """The moment of the next kill of everything."""
        return self._moments[ranks_end].deal()


@dataclass(frozen=True)
class LinkFault:
    """A fault of one link for a span of time.

    Attributes:
        begins_s: Since the first step.
        ends_s: Since the first step.
        link: Such as `1-2`, or `1>2` for one direction.
        cells: Of its row in a trace.
    """

    begins_s: float
    ends_s: float
    link: str
    kind: str
    cells: Mapping[str, str]


def draw_link_faults(
    rng: random.Random, num_ranks: int, direct: Sequence[str], wanted: Sequence[str]
) -> tuple[LinkFault, ...]:
    """Draw faults of a run's links, one after another, for longer than the run lasts.

    Args:
        direct: Its links that begin on their direct routes, of which cards go down.
        wanted: The kinds of `LINK_KINDS` that the run can have.
    """
    kinds = [kind for kind in ("link slow", *LINK_KINDS[:-1]) if kind in wanted]
    deck, at_s, dead_card_s = Deck(kinds, rng), 0.3, _DEAD_CARD_EVERY_S / 4
    faults = []
    while at_s < TRACE_S and (kinds or "card down" in wanted):
        if "card down" in wanted and (at_s >= dead_card_s or not kinds):
            link, kind = rng.choice(direct), "card down"
            dead_card_s = at_s + _DEAD_CARD_EVERY_S
        else:
            low = rng.randrange(num_ranks - 1)
            link = rng.choice((f"{low}-{low + 1}", f"{low}>{low + 1}", f"{low + 1}>{low}"))
            kind = deck.deal()
        ends_s = at_s + rng.uniform(*_LAST_S.get(kind, (0.3, 1.5)))
        faults.append(LinkFault(at_s, ends_s, link, kind, _cells(rng, kind)))
        at_s = ends_s + rng.uniform(0.05, 0.5)
    return tuple(faults)


def _cells(rng: random.Random, kind: str) -> Mapping[str, str]:
    if kind == "card down":  # that of a link's direct route
        return {"cut": "1", "route": "direct"}
    return {
        "link slow": {"latency_ms": f"{rng.uniform(2, 25):.3f}"},
        "link narrow": {"bandwidth_mbps": f"{rng.choice((2, 8, 30))}"},
        "link unsteady": {"latency_ms": "5", "jitter_ms": f"{rng.uniform(1, 8):.3f}"},
        "link cut": {"cut": "1"},
    }[kind]


def trace_text(faults: Sequence[LinkFault]) -> str:
    """The faults, which follow one another, as a trace of links (`read_link_trace`)."""
    written = io.StringIO()
    rows: csv.DictWriter[str] = csv.DictWriter(written, _COLUMNS, restval="", lineterminator="\n")
    rows.writeheader()
    for each in faults:
        healed = {name: value for name, value in each.cells.items() if name == "route"}
        rows.writerow({"time_s": f"{each.begins_s:.6f}", "links": each.link, **each.cells})
        rows.writerow({"time_s": f"{each.ends_s:.6f}", "links": each.link, **healed})
    return written.getvalue()


def begun(faults: Sequence[LinkFault], trained_s: Sequence[float]) -> Iterator[str]:
    """The kinds that began while launches of the ranks trained; each begins the trace anew."""
    for until_s in trained_s:
        yield from (each.kind for each in faults if each.begins_s < until_s)
