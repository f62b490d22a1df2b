"""A schedule: which ops every stage runs, in which order."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxmorph.schedule.grid import format_grid
from jaxmorph.schedule.ops import LiveUntil, Op, OpKind, peak_live
from jaxmorph.schedule.replay import replay
from jaxmorph.schedule.rows import row_fault


class ScheduleError(ValueError):
    """A schedule that breaks a rule.

    Args:
        reason: One line that names the stage, the op and the rule.
        grid: The schedule's grid with the offending ops marked, as in ``>F3<``.
    """

    def __init__(self, reason: str, grid: str) -> None:
        super().__init__(reason, grid)
        self.reason = reason
        self.grid = grid

    def __str__(self) -> str:
        return f"{self.reason}\n{self.grid}"


@dataclass(frozen=True)
class Schedule:
    """The order in which every stage runs its ops; nothing about when or over which route.

    A row is a rank's: with V chunks, rank r of S runs V virtual stages of the pipeline, the one of
    chunk c being virtual stage c * S + r. With one chunk, rank and stage are the same.

    Args:
        name: What the schedule is called: ``1f1b``, ``zb-h2``, ...
        num_microbatches: Number of microbatches in a step.
        orders: One row of ops per stage, in execution order.
    """

    name: str
    num_microbatches: int
    orders: tuple[tuple[Op, ...], ...]

    @classmethod
    def from_rows(cls, name: str, rows: Sequence[str]) -> "Schedule":
        """The schedule whose stages run the ops that ``rows`` spell, as in ``"F0 F1 B0 ..."``.

        Args:
            rows: One line of ops per stage, separated by spaces.

        Returns:
            The schedule, not validated; it has as many microbatches as the ops name.

        Raises:
            ValueError: A word is not an op.
        """
        orders = tuple(tuple(map(Op.parse, row.split())) for row in rows)
        microbatches = (op.microbatch for order in orders for op in order)
        return cls(name, max(microbatches, default=-1) + 1, orders)

    @property
    def num_stages(self) -> int:
        """Number of stages: of ranks, when a rank runs several virtual ones."""
        return len(self.orders)

    @cached_property
    def num_chunks(self) -> int:
        """Number of virtual stages a rank runs: as many as the ops name, at least one."""
        return 1 + max((op.chunk for order in self.orders for op in order), default=0)

    @property
    def splits_backward(self) -> bool:
        """Whether backwards run as B and W rather than as one BW."""
        return any(op.kind is OpKind.B for order in self.orders for op in order)

    @property
    def warmup_forwards(self) -> tuple[int, ...]:
        """How many forwards each stage runs before its first backward, those of all chunks."""
        return tuple(
            next((i for i, op in enumerate(order) if op.kind is not OpKind.F), len(order))
            for order in self.orders
        )

    def peak_live(self, live_until: LiveUntil = "B") -> tuple[int, ...]:
        """Most (microbatch, chunk) pairs each stage holds at once, as ``ops.peak_live`` counts."""
        return tuple(peak_live(order, live_until) for order in self.orders)

    def validate(self) -> None:
        """Checks that every stage's row is complete and in order, and that no stage gets stuck.

        Raises:
            ScheduleError: The first rule that is broken, with the grid and the op marked.
        """
        self.validate_rows()
        ran = replay(self.orders, self.num_microbatches, num_chunks=self.num_chunks)
        self.require_complete(ran.ends)

    def validate_rows(self) -> None:
        """Checks each stage's row by itself: see ``rows.row_fault``.

        Raises:
            ScheduleError: The first op that breaks a rule, marked in the grid.
        """
        if not self.orders or self.num_microbatches < 1:
            raise ScheduleError(
                f"got {self.num_stages} stages and {self.num_microbatches} microbatches, "
                "expected at least one of each",
                str(self),
            )
        num_ops = sum(map(len, self.orders))
        if self.num_chunks > max(1, num_ops):  # tables are made for as many as there are
            raise ScheduleError(
                f"got chunk {self.num_chunks - 1} in a schedule of {num_ops} ops, expected chunks "
                "0, 1, ... that all have ops",
                str(self),
            )
        for stage, order in enumerate(self.orders):
            if fault := row_fault(order, self.num_microbatches, self.num_chunks):
                grid = format_grid(self.orders, {stage: fault.position})
                raise ScheduleError(f"stage {stage}: {fault.reason}", grid)
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
        """Checks that a replay ran every op.

        Args:
            ran: One entry per op that ran, for each stage.

        Raises:
            ScheduleError: Stages wait for each other; the op each is stuck at is marked.
        """
        stuck = {
            stage: len(done)
            for stage, (order, done) in enumerate(zip(self.orders, ran, strict=True))
            if len(done) < len(order)
        }
        if stuck:
            waits = (f"stage {stage} at {self.orders[stage][at]}" for stage, at in stuck.items())
            reason = f"the stages wait for each other in a circle: {', '.join(waits)}"
            raise ScheduleError(reason, format_grid(self.orders, stuck))

    def __str__(self) -> str:
        head = f"{self.name}: {self.num_stages} stages, {self.num_microbatches} microbatches"
        return f"{head}\n{format_grid(self.orders)}"

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Reads a schedule back from its printed form, ``str(schedule)``.

        Raises:
            ValueError: The text is not a printed schedule.
        """
        head, *lines = text.strip().splitlines() or [""]
        name, colon, sizes = head.rpartition(": ")
        words = sizes.split()
        if not colon or words[1::2] != ["stages,", "microbatches"]:
            raise ValueError(f"got {head!r}, expected 'NAME: S stages, N microbatches'")
        orders = tuple(tuple(map(Op.parse, line.split()[2:])) for line in lines)
        if len(orders) != int(words[0]):
            raise ValueError(f"got {len(orders)} rows of ops, expected {words[0]}")
        return cls(name, int(words[2]), orders)

    def to_json(self) -> dict[str, Any]:
        """The schedule as a JSON object: ``name``, ``num_microbatches`` and ``orders`` as text."""
        orders = [[str(op) for op in order] for order in self.orders]
        return {"name": self.name, "num_microbatches": self.num_microbatches, "orders": orders}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Schedule":
        """The schedule that ``to_json`` described.

        Raises:
            ValueError: An op cannot be read.
        """
        orders = tuple(tuple(map(Op.parse, order)) for order in data["orders"])
        return cls(data["name"], data["num_microbatches"], orders)

    def save(self, path: str | Path) -> None:
        """Writes the schedule to a JSON file."""
        Path(path).write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Schedule":
        """Reads a schedule from a file that ``save`` wrote.

        Raises:
            ValueError: The file is not a schedule.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: expected a saved schedule, got {error!r}") from error
