"""Which op a rank runs next while a step runs: the planned one, or another one where that is late.

Ops of one kind always run in microbatch order, so a rank chooses among three heads: its next F, its
next B and its next W. As long as nothing is late it takes the planned op. When the planned op is
not there by its time, the rank has left the plan, and for the rest of the step takes a B before an
F before a W, whichever is there (`Preference` says where it does otherwise). A rank that may move W
alone keeps to the plan, and fills a wait with a W.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from jaxmorph.schedule.memory import StageMemory
from jaxmorph.schedule.ops import Op, OpKind

NEVER_MS = float("inf")

_BEFORE = {OpKind.B: 0, OpKind.BW: 0, OpKind.F: 1, OpKind.W: 2}


class Preference(StrEnum):
    """What a rank prefers once something was late, of what is there.

    Source: the paper's order (Algorithm 3) is B before F before W. `benchmarks.intra_step_gap`
    compares: that is best where memory is no limit. Where it is, a forward that waits for room is
    lost slackness, and each F keeps the place that planning gave it among the Bs; where places are
    held until W, a W that waits costs room as well.
    """

    GRADIENTS = "gradients first"  # all stages before this one wait for them; for a W nobody does
    WEIGHTS_LAST = "weight gradients last"
    PLAN = "what the plan has first"  # the rank is back in the plan as soon as that is there

    @classmethod
    def within(cls, memory: StageMemory, num_microbatches: int) -> "Preference":
        """The preference of a rank with so much memory.

        Args:
            memory: What its microbatches hold, and how much fits.
            num_microbatches: How many there are in a step.
        """
        if memory.room >= num_microbatches * memory.needed:
            return cls.GRADIENTS
        return cls.PLAN if memory.backward_holds else cls.WEIGHTS_LAST


@dataclass(frozen=True)
class Leeway:
    """What a rank may change of its planned order in a step, and when.

    Attributes:
        start_ms: When each op starts by the plan, in its order, milliseconds since the step's
            start.
        memory: What microbatches hold, and how much fits.
        tolerance_ms: By how much an op may be behind its time before that counts as late.
        preference: What it prefers once something was late.
    """

    start_ms: tuple[float, ...]
    end_ms: tuple[float, ...]
    memory: StageMemory
    tolerance_ms: float = 0.0
    preference: Preference = Preference.GRADIENTS

    def to_json(self) -> dict[str, Any]:
        """The leeway as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Leeway":
        """The leeway that ``to_json`` described."""
        return cls(
            tuple(data["start_ms"]),
            tuple(data["end_ms"]),
            StageMemory(*data["memory"]),
            data["tolerance_ms"],
            Preference(data["preference"]),
        )


class Decision(NamedTuple):
    """What to do now.

    Attributes:
        item: The one to take, by its place in the plan; None: wait for what could be taken.
        until_ms: When to ask again at the latest, where there is nothing to take.
    """

    item: int | None
    until_ms: float = NEVER_MS


class OnlineOrder:
    """One rank's order in one step, decided item by item.

    Args:
        items: The planned order: ops, and None for what keeps its place among them.
        movable: The kinds of op that may run out of the planned order: all kinds, W alone, or none.
        leeway: The plan's times of the ops, and the rank's memory.
    """

    def __init__(
        self, items: Sequence[Op | None], movable: frozenset[OpKind], leeway: Leeway
    ) -> None:
        self._items = items
        self._leeway = leeway
        self._prefers = leeway.preference
        self._movable = movable
        self._may_leave = OpKind.F in movable and leeway.preference is not Preference.PLAN
        self._taken = [False] * len(items)
        self._first = 0
        self._of_kind: dict[OpKind, list[int]] = {}
        self._waits_ms: dict[int, tuple[float, float]] = {}
        self._starts_ms: dict[Op, float] = {}
        self._durations_ms: dict[Op, float] = {}
        self._index_ops()
        self._next = dict.fromkeys(self._of_kind, 0)
        self._held = 0
        self._late: int | None = None  # the planned item that has been found late
        self._ended_ms = NEVER_MS  # the last op that has run
        self._behind_ms = 0.0  # the most that an op has ended late by for what ops took
        self.has_left_plan = False

    def _index_ops(self) -> None:
        """Each kind's ops in order; of each op its planned start, and the wait before it."""
        ended_ms, ops = 0.0, 0
        for index, op in enumerate(self._items):
            if op is None:
                continue
            self._of_kind.setdefault(op.kind, []).append(index)
            start_ms = self._leeway.start_ms[ops]
            self._waits_ms[index] = start_ms, start_ms - ended_ms
            ended_ms, ops = self._leeway.end_ms[ops], ops + 1
            self._starts_ms[op] = start_ms
            self._durations_ms[op] = ended_ms - start_ms

    @property
    def planned(self) -> int | None:
        """The first item of the plan that hasn't been taken; None when all have."""
        while self._first < len(self._items) and self._taken[self._first]:
            self._first += 1
        return self._first if self._first < len(self._items) else None

    @property
    def is_choosing(self) -> bool:
        """Whether something is late, so that what comes next is chosen."""
        return self.has_left_plan or (self._late is not None and self._late == self.planned)

    def decide(self, now_ms: float, dry_ms: float, can_run: Callable[[int], bool]) -> Decision:
        """What to take now; `take` it before asking again.

        Args:
            now_ms: The time since the step's start.
            dry_ms: When the rank has nothing left to run; later than now while it has. While it
                isn't choosing this must be known: that ops take longer than planned makes no
                message late.
            can_run: Whether an item's data has come and its results have room to leave.

        Returns:
            The item, or how long to wait; while there is still work nothing is decided that could
            come out another way once there is none.
        """
        planned = self.planned
        if planned is None:
            return Decision(None)
        if not self.has_left_plan and self._fits(planned) and can_run(planned):
            return Decision(planned)
        most_urgent = next(iter(self.heads()), None) if self.has_left_plan else None
        if most_urgent is not None and self._can_take(most_urgent, can_run):
            return Decision(most_urgent)  # nothing that may still come would be taken before it
        if not self._movable or now_ms < dry_ms:
            return Decision(None, dry_ms if self._movable and dry_ms > now_ms else NEVER_MS)
        if not self.is_choosing:
            late_ms = self._late_ms(planned, dry_ms)
            if now_ms < late_ms:
                return Decision(None, late_ms)
            self._late, self.has_left_plan = planned, self._may_leave
        found = (index for index in self.heads() if self._can_take(index, can_run))
        return Decision(next(found, None))

    def take(self, index: int) -> None:
        """An item has been handed to the rank's queue."""
        self._taken[index] = True
        op = self._items[index]
        if op is not None:
            self._next[op.kind] += 1
            self._held += self._change(op.kind)

    def ran(self, op: Op, start_ms: float, end_ms: float) -> None:
        """An op has run; those that were taken are told in the order in which they ran.

        What others make of its result comes later by as much as it has ended late, and no link is
        to blame for that.

        Args:
            start_ms: When it began, since the step's start.
            end_ms: When it ended.
        """
        behind_ms = min(max(0.0, start_ms - self._starts_ms[op]), self._behind_ms)
        behind_ms += end_ms - start_ms - self._durations_ms[op]
        self._behind_ms = max(self._behind_ms, behind_ms)
        self._ended_ms = end_ms

    def duration_ms(self, op: Op) -> float:
        """How long an op should take."""
        return self._durations_ms.get(op, 0.0)

    def heads(self) -> list[int]:
        """The items that may be next, the most urgent first, if their data is there."""
        kinds = sorted(self._movable & self._of_kind.keys(), key=_BEFORE.__getitem__)
        rows = ((self._of_kind[kind], self._next[kind]) for kind in kinds)
        heads = [row[count] for row, count in rows if count < len(row)]
        return heads if self._prefers is Preference.GRADIENTS else sorted(heads, key=self._place)

    def _place(self, index: int) -> tuple[bool, int]:
        op = self._items[index]
        is_weight = op is not None and op.kind is OpKind.W
        return is_weight and self._prefers is Preference.WEIGHTS_LAST, index

    def _late_ms(self, planned: int, dry_ms: float) -> float:
        """From when on an item is late: not while the plan itself lets the rank wait.

        The plan's wait begins with the end of the op before it: it has room for direct transfers.
        """
        start_ms, wait_ms = self._waits_ms.get(planned, (0.0, 0.0))
        since_ms = min(dry_ms, self._ended_ms)
        late_ms = max(start_ms + self._behind_ms, since_ms + wait_ms)
        return late_ms + self._leeway.tolerance_ms

    def _can_take(self, index: int, can_run: Callable[[int], bool]) -> bool:
        return self._fits(index) and can_run(index)

    def _fits(self, index: int) -> bool:
        """Whether the rank has run what an item needs of its own, and has memory for it."""
        op = self._items[index]
        if op is None or op.kind is OpKind.W:
            return op is None or self._count(OpKind.W) < self._count(OpKind.B)
        if op.kind is not OpKind.F:
            if self._count(OpKind.F) <= self._count(op.kind):
                return False
            return op.kind is OpKind.BW or self._has_room(self._change(op.kind))
        # Ahead of the plan, F leaves room for its B, if that holds more: else none could go on.
        is_planned = index == self.planned
        more = self._change(op.kind) if is_planned else self._leeway.memory.needed
        return self._has_room(more)

    def _has_room(self, more: int) -> bool:
        return more <= 0 or self._held + more <= self._leeway.memory.room

    def _count(self, kind: OpKind) -> int:
        return self._next.get(kind, 0)

    def _change(self, kind: OpKind) -> int:
        after_forward, after_backward, _ = self._leeway.memory
        match kind:
            case OpKind.F:
                return after_forward
            case OpKind.B:
                return after_backward - after_forward
            case OpKind.W:
                return -after_backward
            case OpKind.BW:
                return -after_forward
