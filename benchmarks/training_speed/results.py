"""From the turns of all contenders to the table and the bars."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.results import Bar
from benchmarks.training_speed import contenders as names
from benchmarks.training_speed.contenders import Contender
from benchmarks.training_speed.turns import Turn

LEAST_OF_PLAIN, LEAST_OF_PEER, MOST_APART = 0.95, 1.0, 0.02
_OF_TORCH = (names.STAGES_1F1B, names.TORCH_1F1B), (names.STAGES_ZB, names.TORCH_ZB)
# SpectraX has no zb-h2: its zero bubbles keep fewer stashes.
_OF_SPECTRAX = (names.STAGES_1F1B, names.SPECTRAX_1F1B), (names.STAGES_ZB, names.SPECTRAX_ZB)


@dataclass(frozen=True)
class Speed:
    """One contender's row; medians over the rounds.

    Attributes:
        name: The contender.
        num_cores: Of all of them together.
        tokens_per_s: Of all of them together.
        of_alone: Throughput per core, relative to its framework's own run in one process on one
            core in the same round; None for such a run itself.
        cpu_us: Microseconds of processor time for each token, waiting left out.
        last_loss: Of its last step.
    """

    name: str
    num_ranks: int
    num_cores: int
    tokens_per_s: float
    of_alone: float | None
    cpu_us: float
    last_loss: float

    def __str__(self) -> str:
        of_alone = "" if self.of_alone is None else f"{self.of_alone:.3f}"
        return (
            f"{self.name:30}{self.num_ranks:9}{self.num_cores:7}{self.tokens_per_s:10.0f}"
            f"{self.tokens_per_s / self.num_cores:10.0f}{of_alone:>10}{self.cpu_us:14.0f}"
            f"{self.last_loss:8.4f}"
        )


HEADER = f"{'contender':30}processes  cores  tokens/s  per core  of alone  CPU us/token    loss"
Turns = Mapping[str, Sequence[Turn]]


def speeds(contenders: Sequence[Contender], turns: Turns, tokens: int) -> list[Speed]:
    """A row for each contender.

    Args:
        turns: Of each, in the order of the rounds.
        tokens: Of one turn.
    """
    return [
        Speed(
            each.name,
            each.num_ranks,
            each.num_cores,
            tokens / median(turn.seconds for turn in turns[each.name]),
            per_core(each, turns) if each.alone in turns else None,
            1e6 * median(turn.cpu_s for turn in turns[each.name]) / tokens,
            turns[each.name][-1].losses[-1],
        )
        for each in contenders
    ]


def per_core(contender: Contender, turns: Turns) -> float:
    """Throughput per core relative to the run in one process on one core."""
    return _ratio(turns, contender.name, contender.alone) / contender.num_cores


def bars(contenders: Sequence[Contender], turns: Turns) -> Iterator[Bar]:
    """What should hold between the contenders that ran."""
    by_name = {each.name: each for each in contenders}
    for ours, plain in ((names.STAGE, names.PLAIN), (names.STAGE_TWO, names.PLAIN_TWO)):
        if {ours, plain} <= turns.keys():
            yield Bar(f"{ours} / {plain}", _ratio(turns, ours, plain), at_least=LEAST_OF_PLAIN)
    for ours, theirs in _OF_TORCH:  # of two frameworks: each beside its own speed on one core
        if {ours, theirs} <= turns.keys():
            over = per_core(by_name[ours], turns) / per_core(by_name[theirs], turns)
            yield Bar(f"per core of alone: {ours} / {theirs}", over, at_least=LEAST_OF_PEER)
    yield Bar("largest difference between losses of one step", _apart(turns), at_most=MOST_APART)
    # As they are: which framework is quicker on one core alone depends on the machine.
    for ours, theirs in (*_OF_TORCH, *_OF_SPECTRAX):
        if {ours, theirs} <= turns.keys():
            of_both = f"{ours} / {theirs}"
            over = _ratio(turns, ours, theirs)
            yield Bar(f"tokens/s: {of_both}", over, at_least=LEAST_OF_PEER)
            over = _ratio(turns, ours, theirs, "cpu_s")
            yield Bar(f"tokens by processor time: {of_both}", over, at_least=LEAST_OF_PEER)


def _ratio(turns: Turns, ours: str, theirs: str, of: str = "seconds") -> float:
    """How much faster one is than another, by a time of a turn: the median over the rounds."""
    pairs = zip(turns[ours], turns[theirs], strict=True)
    return median(getattr(there, of) / getattr(here, of) for here, there in pairs)


def _apart(turns: Turns) -> float:
    """The largest difference of losses; it should be rounding alone, on the same batches."""
    of_each = [[loss for turn in own for loss in turn.losses] for own in turns.values()]
    return max(max(step) - min(step) for step in zip(*of_each, strict=True))
