"""The faults of a run; shuffled decks of their kinds have each come as often as it should."""

import csv
import io
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

QUIET_STEPS = 30  # before the last step nothing fails any more: that state must be saved
TRACE_S = 900.0
FIRST_STEP = 4
STORAGE_STEPS = (6, 9)  # with a save after every fifth step each of them meets one
NO_ROOM = "No space left on device"
_COLUMNS = ("time_s", "links", "latency_ms", "bandwidth_mbps", "jitter_ms", "cut", "route")
_DEAD_CARD_EVERY_S = 10.0
_Card = TypeVar("_Card")

Ends = Literal["nothing", "ranks", "command"]
Moment = Literal["at any time", "start", "save", "morph", "failover"]
MOMENTS: tuple[Moment, ...] = ("at any time", "start", "save", "morph", "failover")


@dataclass(frozen=True)
class Kind:
    """What one kind of fault is, and what follows.

    Attributes:
        named: A pattern of what the run says of its cause: an event's `kind: detail`, or a line of
            a log or of the terminal; {rank} is the rank that it happened to. Empty: it only slows
            the run down, and nothing need name it.
        ends: What ends with it: the ranks, which the command starts again; or the command, which
            is started again with `--resume auto`.
        weight: How many a deck has.
        stands_s: How long it lasts, from and to.
    """

    named: str
    ends: Ends = "nothing"
    weight: int = 1
    stands_s: tuple[float, float] = (0.0, 0.0)


KINDS: Mapping[str, Kind] = {
    "rank killed": Kind("^rank_failed: rank {rank} failed: ended by SIGKILL", "ranks"),
    "rank stopped for ever": Kind("^rank_failed: rank {rank} failed: stalled: ", "ranks"),
    "queue never ends": Kind(
        "^rank_failed: rank {rank} failed: stalled: .*its queue is at ", "ranks"
    ),
    "rank stopped": Kind("", weight=2, stands_s=(0.05, 0.8)),
    "sidecar killed": Kind("^sidecar_restarted: ", weight=2),
    "sidecar stopped": Kind("", weight=2, stands_s=(0.05, 0.8)),
    "sidecar stopped for ever": Kind("^sidecar_restarted: .*no sign of life"),
    "planning killed": Kind(""),
    "planning stopped": Kind("", stands_s=(0.5, 3.0)),
    "card resets connections": Kind("^lane_(down|closed): ", stands_s=(0.2, 3.0)),
    "storage failing": Kind("^checkpoint_failed: "),
    "disk full": Kind(NO_ROOM),
    "launcher killed": Kind("^resumed: ", "command"),
    "everything killed": Kind("^resumed: ", "command"),
    "files damaged": Kind(
        "^files_damaged: |^checkpoint_damaged: |compiled again|programs are compiled", "command"
    ),
}
"""The kinds of faults that processes and files have."""

TROUBLES = ("link slow", "link narrow", "link unsteady", "link cut", "card down")
"""The kinds of faults that links have; they come by time, beside the others."""
CUTS = ("link cut", "card down")  # emulated ones hold until the command restarts its ranks


class Deck(Generic[_Card]):
    """Deals cards in random order, and each of them once before any comes again."""

    def __init__(self, cards: Sequence[_Card], rng: random.Random) -> None:
        self._cards, self._rng, self._left = list(cards), rng, []

    def deal(self) -> _Card:
        """The next card."""
        if not self._left:
            self._left: list[_Card] = self._rng.sample(self._cards, len(self._cards))
        return self._left.pop()


def kinds_of(ranks_end: bool, wanted: Sequence[str]) -> list[str]:
    """The kinds for a deck of a run in which ranks may end, or of one in which they may not."""
    return [
        name
        for name, kind in KINDS.items()
        if name in wanted and (ranks_end or kind.ends != "ranks")
        for _ in range(kind.weight)
    ]


@dataclass
class Dealer:
    """Deals the faults of all runs.

    Attributes:
        wanted: The kinds that are wanted.
        met: How often each has happened so far, by its name.
    """

    rng: random.Random
    wanted: Sequence[str]
    met: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Shuffle a deck for each sort of run."""
        decks = {ranks_end: kinds_of(ranks_end, self.wanted) for ranks_end in (True, False)}
        self._decks = {key: Deck(cards, self.rng) for key, cards in decks.items() if cards}
        moments = {True: [each for each in MOMENTS if each != "failover"], False: MOMENTS}
        self._moments = {key: Deck(cards, self.rng) for key, cards in moments.items()}

    def deal(self, *, ranks_end: bool) -> str | None:
        """The next kind of fault, None if such runs have none."""
        deck = self._decks.get(ranks_end)
        return deck.deal() if deck else None

    def moment(self, *, ranks_end: bool) -> Moment:
        """The moment of the next kill of everything."""
        return self._moments[ranks_end].deal()


@dataclass(frozen=True)
class Trouble:
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
    cells: tuple[tuple[str, str], ...]


def draw_troubles(
    rng: random.Random, num_ranks: int, direct: Sequence[str], wanted: Sequence[str]
) -> tuple[Trouble, ...]:
    """Draw faults of a run's links, one after another, for longer than the run lasts.

    Args:
        direct: Its links that begin on their direct routes, of which cards go down.
        wanted: The kinds of `TROUBLES` that the run can have.
    """
    kinds = [kind for kind in ("link slow", *TROUBLES[:-1]) if kind in wanted]
    deck, at_s, dead_card_s = Deck(kinds, rng), 0.3, _DEAD_CARD_EVERY_S / 4
    troubles = []
    while at_s < TRACE_S and (kinds or "card down" in wanted):
        if "card down" in wanted and (at_s >= dead_card_s or not kinds):
            trouble = _dead_card(rng, at_s, rng.choice(direct))
            dead_card_s = at_s + _DEAD_CARD_EVERY_S
        else:
            low = rng.randrange(num_ranks - 1)
            way = rng.choice((f"{low}-{low + 1}", f"{low}>{low + 1}", f"{low + 1}>{low}"))
            trouble = _trouble(rng, at_s, way, deck.deal())
        troubles.append(trouble)
        at_s = trouble.ends_s + rng.uniform(0.05, 0.5)
    return tuple(troubles)


def _trouble(rng: random.Random, at_s: float, way: str, kind: str) -> Trouble:
    lasts_s = rng.uniform(0.2, 0.8) if kind == "link cut" else rng.uniform(0.3, 1.5)
    cells = {
        "link slow": {"latency_ms": f"{rng.uniform(2, 25):.3f}"},
        "link narrow": {"bandwidth_mbps": f"{rng.choice((2, 8, 30))}"},
        "link unsteady": {"latency_ms": "5", "jitter_ms": f"{rng.uniform(1, 8):.3f}"},
        "link cut": {"cut": "1"},
    }[kind]
    return Trouble(at_s, at_s + lasts_s, way, kind, tuple(cells.items()))


def _dead_card(rng: random.Random, at_s: float, link: str) -> Trouble:
    """The card of a link's direct route goes down, and comes back."""
    cells = (("cut", "1"), ("route", "direct"))
    return Trouble(at_s, at_s + rng.uniform(2.5, 5.0), link, "card down", cells)


def trace_text(troubles: tuple[Trouble, ...]) -> str:
    """The troubles, which follow one another, as a trace of links (`read_link_trace`)."""
    written = io.StringIO()
    rows: csv.DictWriter[str] = csv.DictWriter(written, _COLUMNS, restval="", lineterminator="\n")
    rows.writeheader()
    for each in troubles:
        at = {"links": each.link}
        cells = dict(each.cells)
        healed = {name: value for name, value in cells.items() if name == "route"}
        rows.writerow({"time_s": f"{each.begins_s:.6f}", **at, **cells})
        rows.writerow({"time_s": f"{each.ends_s:.6f}", **at, **healed})
    return written.getvalue()


def begun(troubles: Sequence[Trouble], lives_s: Sequence[float]) -> Iterator[str]:
    """The kinds of troubles that began in lives of the ranks; each life begins the trace anew."""
    for life_s in lives_s:
        yield from (each.kind for each in troubles if each.begins_s < life_s)
