"""What came of runs and of their faults: results bit by bit, and a table of the kinds."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxmorph.records import StepRecord
from jaxmorph.report.run_directory import METRICS, read_records
from jaxmorph.training.saved_model import load_saved_model


@dataclass(frozen=True)
class Computed:
    """What came of a run.

    Attributes:
        steps: Number, loss and gradient norm of each step, as they were recorded.
        parameters: A digest of the last checkpoint's parameters, by their names.
    """

    steps: tuple[tuple[int, float, float], ...]
    parameters: str


def computed_by(out: Path) -> Computed:
    """What a finished run in a directory has computed.

    Raises:
        UserError: If it has no checkpoint.
    """
    records = read_records(out / METRICS, StepRecord)
    steps = tuple((record.step, record.loss, record.grad_norm) for record in records)
    saved, digest = load_saved_model(out), hashlib.sha256()
    digest.update(f"{saved.step} steps".encode())
    for layers, params in saved.stages:
        for path, leaf in jax.tree.leaves_with_path(params):
            array = np.asarray(leaf)
            name = f"{layers} {jax.tree_util.keystr(path)} {array.dtype} {array.shape}"
            digest.update(name.encode() + array.tobytes())
    return Computed(steps, digest.hexdigest())


def differences(found: Computed, expected: Computed) -> list[str]:
    """A line for each difference between two runs, missing steps included."""
    by_step = {step: (step, *rest) for step, *rest in found.steps}
    wrong = [
        f"step {step[0]}: got {by_step.get(step[0])}, expected {step}"
        for step in expected.steps
        if by_step.get(step[0]) != step
    ]
    if len(found.steps) != len(expected.steps):
        wrong.append(f"got {len(found.steps)} lines of steps, expected {len(expected.steps)}")
    if found.parameters != expected.parameters:
        wrong.append(f"parameters: got {found.parameters}, expected {expected.parameters}")
    return wrong


WHOLE_RUN = "a run as a whole"


@dataclass
class Outcome:
    """What came of one fault.

    Attributes:
        step: The last one before it.
        detail: Such as which file was damaged.
        recovered_s: From the fault's end, or from its beginning if it stays, until a later step.
        wrong: Differences from the undisturbed run until the next fault.
        hang: What was seen when the run hung; "" if it didn't.
        leaks: What was left of ended processes.
        unnamed: Whether nothing that the run reports names the cause.
    """

    kind: str
    step: int = -1
    detail: str = ""
    recovered_s: float | None = None
    wrong: int = 0
    hang: str = ""
    leaks: tuple[str, ...] = ()
    unnamed: bool = False

    @property
    def holds(self) -> bool:
        """Whether all is as it should be."""
        return not (self.wrong or self.hang or self.leaks or self.unnamed)


def attribute(wrong: Sequence[str], outcomes: Sequence[Outcome]) -> None:
    """Count each difference (`differences`) for the last fault before its step.

    Args:
        outcomes: Of a run, in order; the last one is of the run as a whole, which has the rest.
    """
    *faults, whole = outcomes
    for line in wrong:
        of_step = re.match(r"step (\d+):", line)
        step = int(of_step[1]) if of_step else -1
        before = [each for each in faults if each.step < step]
        (before[-1] if before else whole).wrong += 1


COLUMNS = ("count", "worst_s", "wrong", "hangs", "leaks", "unnamed")
Table = dict[str, dict[str, float | None]]


def table_of(outcomes: Sequence[Outcome], kinds: Sequence[str]) -> Table:
    """A row for each kind, with the sums of its faults and the worst time that one took."""
    table: Table = {}
    for kind in kinds:
        own = [each for each in outcomes if each.kind == kind]
        took_s = [each.recovered_s for each in own if each.recovered_s is not None]
        figures = (
            0 if kind == WHOLE_RUN else len(own),
            round(max(took_s), 1) if took_s else None,
            sum(each.wrong for each in own),
            sum(bool(each.hang) for each in own),
            sum(len(each.leaks) for each in own),
            sum(each.unnamed for each in own),
        )
        table[kind] = dict(zip(COLUMNS, figures, strict=True))
    return table


def in_words(table: Table) -> Iterator[str]:
    """The table's lines."""
    heads = ("count", "worst s", *COLUMNS[2:])
    yield f"{'fault':26}" + "".join(f"{head:>9}" for head in heads)
    for kind, row in table.items():
        cells = ("-" if value is None else f"{value:g}" for value in row.values())
        yield f"{kind:26}" + "".join(f"{cell:>9}" for cell in cells)


def missed(table: Mapping[str, Mapping[str, float | None]]) -> int:
    """How much is not as it should be."""
    return sum(int(row[name] or 0) for row in table.values() for name in COLUMNS[2:])


def too_few(
    table: Mapping[str, Mapping[str, float | None]], needed: Mapping[str, int], in_all: int
) -> list[str]:
    """A line for each kind that came less often than it is needed, and for all of them."""
    counts = {kind: int(table[kind]["count"] or 0) for kind in needed}
    compared = [(kind, counts[kind], number) for kind, number in needed.items()]
    compared.append(("faults in all", sum(counts.values()), in_all))
    return [f"{kind}: {count} of {number}" for kind, count, number in compared if count < number]
