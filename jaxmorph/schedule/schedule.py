"""A schedule: which ops every stage runs in which order, the rules it keeps, and its text forms."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from jaxmorph.placement import Placement, PlacementKind
from jaxmorph.schedule.ops import LiveUntil, Op, OpKind, peak_live
from jaxmorph.schedule.replay import replay

FaultKind = Literal["missing op", "bad order", "deadlock"]


class ScheduleError(ValueError):
    """A schedule that breaks a rule.

    Args:
        reason: One line that names the stage, the op and the rule.
        grid: The schedule's grid with the offending ops marked, as in ``>F3<``.
        kind: ``missing op``, ``bad order`` (of a stage's own ops) or ``deadlock`` (between stages).
    """

    def __init__(self, reason: str, grid: str, kind: FaultKind = "bad order") -> None:
        super().__init__(reason, grid, kind)
        self.reason = reason
        self.grid = grid
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.reason}\n{self.grid}"


@dataclass(frozen=True)
class Schedule:
    """The order in which every stage runs its ops, one row per stage; no times and no routes.

    With several chunks, a row belongs to a rank, which runs its virtual stages (`placement`).
    """

    name: str
    num_microbatches: int
    orders: tuple[tuple[Op, ...], ...]
    placement_kind: PlacementKind = "wrap"

    @classmethod
    def from_rows(cls, name: str, rows: Sequence[str]) -> "Schedule":
        """An unvalidated schedule from rows such as ``"F0 F1 B0 ..."``, one per stage.

        Raises:
            ValueError: A word is not an op.
        """
        orders = tuple(tuple(map(Op.parse, row.split())) for row in rows)
        microbatches = (op.microbatch for order in orders for op in order)
        return cls(name, max(microbatches, default=-1) + 1, orders)

    @property
    def num_stages(self) -> int:
        """Number of rows: stages, or ranks if each rank runs several virtual stages."""
        return len(self.orders)

    @cached_property
    def num_chunks(self) -> int:
        """Number of virtual stages a rank runs, V."""
        if self.placement_kind == "v":
            return 2
        return 1 + max((op.chunk for order in self.orders for op in order), default=0)

    @cached_property
    def placement(self) -> Placement:
        """Which rank runs which virtual stage."""
        return Placement(self.num_stages, self.num_chunks, self.placement_kind)

    @property
    def splits_backward(self) -> bool:
        """Whether backwards run as B and W rather than as BW."""
        return any(op.kind is OpKind.B for order in self.orders for op in order)

    @cached_property
    def warmup_forwards(self) -> tuple[int, ...]:
        """How many forwards, of all chunks, each stage runs before its first backward."""
        return tuple(
            next((i for i, op in enumerate(order) if op.kind is not OpKind.F), len(order))
            for order in self.orders
        )

    def peak_live(self, live_until: LiveUntil = "B") -> tuple[int, ...]:
        """``ops.peak_live`` of every stage."""
        return tuple(peak_live(order, live_until) for order in self.orders)

    def with_weight_groups(self, size: int) -> "Schedule":
        """The schedule with one W per ``size`` microbatches of a chunk, where the last one's W was.

        The last group is smaller if the number of microbatches is not a multiple of ``size``.
        """
        if size == 1:
            return self
        rows = (_grouped(order, size, self.num_microbatches) for order in self.orders)
        return replace(self, orders=tuple(map(tuple, rows)))

    def validate(self) -> None:
        """Checks that every stage's row is complete and in order, and that no stage gets stuck.

        Raises:
            ScheduleError: The first broken rule; its grid marks the op.
        """
        self.validate_rows()
        ran = replay(self.orders, self.num_microbatches, self.placement)
        self.require_complete(ran.ends)

    def validate_rows(self) -> None:
        """Checks each stage's row alone: see ``row_fault``.

        Raises:
            ScheduleError: The first broken rule; its grid marks the op.
        """
        if not self.orders or self.num_microbatches < 1:
            raise ScheduleError(
                f"got {self.num_stages} stages and {self.num_microbatches} microbatches, "
                "expected at least one of each",
                str(self),
            )
        num_ops = sum(map(len, self.orders))
        if self.num_chunks > max(1, num_ops):  # else 1000000000.F0 would need tables of that size
            raise ScheduleError(
                f"got chunk {self.num_chunks - 1} in a schedule of {num_ops} ops, expected chunks "
                "0, 1, ... that all have ops",
                str(self),
            )
        for stage, order in enumerate(self.orders):
            if fault := row_fault(order, self.num_microbatches, self.num_chunks):
                grid = format_grid(self.orders, {stage: fault.position})
                raise ScheduleError(f"stage {stage}: {fault.reason}", grid, fault.kind)
        self._require_one_kind_of_backward()

    def _require_one_kind_of_backward(self) -> None:
        first_backward = self.warmup_forwards
        split = [self.orders[stage][at].kind is OpKind.B for stage, at in enumerate(first_backward)]
        for stage, position in enumerate(first_backward):
            op = self.orders[stage][position]
            if any(split) and not split[stage]:
                grid = format_grid(self.orders, {stage: position})
                reason = f"{op} is a full backward (BW), but other stages split theirs (B, W)"
                raise ScheduleError(f"stage {stage}: {reason}", grid)

    def require_complete(self, ran: Sequence[Sequence[float]]) -> None:
        """Checks that a replay ran every op; ``ran`` has one entry per op that ran on each stage.

        Raises:
            ScheduleError: Stages wait for each other; the grid marks the op where each is stuck.
        """
        stuck = {
            stage: len(done)
            for stage, (order, done) in enumerate(zip(self.orders, ran, strict=True))
            if len(done) < len(order)
        }
        if stuck:
            waits = (f"stage {stage} at {self.orders[stage][at]}" for stage, at in stuck.items())
            reason = f"the stages wait for each other in a circle: {', '.join(waits)}"
            raise ScheduleError(reason, format_grid(self.orders, stuck), "deadlock")

    def __str__(self) -> str:
        head = f"{self.name}: {self.num_stages} stages, {self.num_microbatches} microbatches"
        if self.placement_kind == "v":
            head += ", in a v"
        return f"{head}\n{format_grid(self.orders)}"

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Reads a schedule back from ``str(schedule)``.

        Raises:
            ValueError: The text is not a printed schedule.
        """
        head, *lines = text.strip().splitlines() or [""]
        name, colon, sizes = head.rpartition(": ")
        words = sizes.split()
        in_a_v = words[3:] == ["microbatches,", "in", "a", "v"]
        if not colon or words[1:2] != ["stages,"] or not (in_a_v or words[3:] == ["microbatches"]):
            raise ValueError(f"got {head!r}, expected 'NAME: S stages, N microbatches'")
        orders = tuple(tuple(map(Op.parse, line.split()[2:])) for line in lines)
        if len(orders) != int(words[0]):
            raise ValueError(f"got {len(orders)} rows of ops, expected {words[0]}")
        return cls(name, int(words[2]), orders, "v" if in_a_v else "wrap")

    def to_json(self) -> dict[str, Any]:
        """A JSON object of ``name``, ``num_microbatches`` and ``orders``, with ops as text.

        It includes ``placement`` unless that is ``wrap``.
        """
        orders = [[str(op) for op in order] for order in self.orders]
        placement = {} if self.placement_kind == "wrap" else {"placement": self.placement_kind}
        sizes = {"name": self.name, "num_microbatches": self.num_microbatches}
        return {**sizes, **placement, "orders": orders}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Schedule":
        """The schedule that ``to_json`` described.

        Raises:
            ValueError: An op cannot be read, or the placement is unknown.
        """
        orders = tuple(tuple(map(Op.parse, order)) for order in data["orders"])
        placement = data.get("placement", "wrap")
        if placement not in get_args(PlacementKind):
            raise ValueError(f"placement: got {placement!r}, expected 'wrap' or 'v'")
        return cls(data["name"], data["num_microbatches"], orders, placement)


def _grouped(order: Sequence[Op], size: int, num_microbatches: int) -> Iterator[Op]:
    for op in order:
        if op.kind is not OpKind.W:
            yield op
        elif (end := op.microbatch + 1) % size == 0 or end == num_microbatches:
            first = op.microbatch // size * size
            yield Op(OpKind.W, first, op.chunk, end - first)


class RowFault(NamedTuple):
    """The position of the first op that breaks a rule (the row's length if one is missing)."""

    position: int
    reason: str
    kind: FaultKind = "bad order"


def row_fault(order: Sequence[Op], num_microbatches: int, num_chunks: int = 1) -> RowFault | None:
    """Finds the first op of a stage's row that breaks one of these rules.

    - Every microbatch of every chunk has one F, and either one B and one W or one BW.
    - A microbatch runs F of chunks 0, 1, ..., then B (or BW) of the chunks in reverse; W follows
      B of all its microbatches on its chunk.
    - Ops of one kind and chunk run in microbatch order.
    - A row splits all of its backwards or none.
    """
    forward_kind, weight_kind, full_kind = OpKind.F, OpKind.W, OpKind.BW
    # As ops of one kind and chunk run in microbatch order, counts identify what has run:
    # ``passed`` is how many microbatches have passed F of each chunk, then B from the last chunk.
    last_pass = 2 * num_chunks
    passed = [num_microbatches] + [0] * last_pass
    weights = [0] * num_chunks
    splits = fulls = False
    for position, (kind, microbatch, chunk, group) in enumerate(order):
        if not 0 <= chunk < num_chunks:
            return RowFault(position, _unknown_chunk(chunk, num_chunks))
        if kind is weight_kind:
            splits = True
            expected, ready = weights[chunk], passed[last_pass - chunk]
            weights[chunk] = expected + group
        else:
            if kind is forward_kind:
                this_pass = 1 + chunk
            else:
                this_pass = last_pass - chunk
                if kind is full_kind:
                    fulls = True
                else:
                    splits = True
            expected, ready = passed[this_pass], passed[this_pass - 1]
            passed[this_pass] = expected + 1
        if microbatch != expected or microbatch + group > ready or (fulls and splits):
            return RowFault(position, _why(order, position, num_microbatches, num_chunks))
    counts = {OpKind.F: passed[1 : 1 + num_chunks]}
    counts[OpKind.B if splits else OpKind.BW] = passed[: -1 - num_chunks : -1]
    if splits:
        counts[OpKind.W] = weights
    return _missing(counts, len(order), num_microbatches)


def _unknown_chunk(chunk: int, num_chunks: int) -> str:
    expected = f"0 to {num_chunks - 1}" if num_chunks > 1 else "0"
    return f"got chunk {chunk}, expected {expected}"


def _why(order: Sequence[Op], position: int, num_microbatches: int, num_chunks: int) -> str:
    op, earlier = order[position], order[:position]
    alike = (before for before in earlier if (before.kind, before.chunk) == (op.kind, op.chunk))
    expected = sum(before.group for before in alike)
    if op.microbatches[-1] >= num_microbatches:
        return f"{op} is beyond the last microbatch, {num_microbatches - 1}"
    if op in earlier:
        return f"{op} is there twice"
    if op.microbatch != expected:
        return f"{op} is out of microbatch order, expected {op._replace(microbatch=expected)}"
    for needed in _needed(op, num_chunks):
        if needed not in earlier:
            return f"{op} comes before {needed}"
    return f"{op} mixes full backwards (BW) with split ones (B, W)"


def _needed(op: Op, num_chunks: int) -> list[Op]:
    """The ops that must come before ``op`` in its row."""
    if op.kind is OpKind.F:
        return [op._replace(chunk=op.chunk - 1)] if op.chunk else []
    if op.kind is OpKind.W:
        return [Op(OpKind.B, op.microbatches[-1], op.chunk)]
    above = [op._replace(chunk=op.chunk + 1)] if op.chunk + 1 < num_chunks else []
    return [op._replace(kind=OpKind.F), *above]


def _missing(
    counts: Mapping[OpKind, Sequence[int]], num_ops: int, num_microbatches: int
) -> RowFault | None:
    """The first missing op, given how many ran of each kind and chunk."""
    for kind, of_chunks in counts.items():
        for chunk, count in enumerate(of_chunks):
            if count < num_microbatches:
                return RowFault(num_ops, f"{Op(kind, count, chunk)} is missing", "missing op")
    return None


def format_grid(orders: Sequence[Sequence[Op]], marked: Mapping[int, int] | None = None) -> str:
    """One line per stage with aligned columns.

    Args:
        marked: A position per stage to mark as ``>F3<``; one past the end marks a missing op.
    """
    marked = marked or {}
    rows = [_row(order, marked.get(stage)) for stage, order in enumerate(orders)]
    width = max((len(cell) for row in rows for cell in row), default=0)
    digits = len(str(len(rows) - 1))
    return "\n".join(
        f"stage {stage:>{digits}}  {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for stage, row in enumerate(rows)
    )


def _row(order: Sequence[Op], marked: int | None) -> list[str]:
    cells = [str(op) for op in order]
    if marked is not None and marked < len(cells):
        cells[marked] = f">{cells[marked]}<"
    elif marked is not None:
        cells.append("><")
    return cells
