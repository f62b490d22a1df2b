"""Time of the dispatching thread for each kind of instruction, within real steps."""

import time
from collections import defaultdict
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any, Self

from jaxmorph.program.instructions import Instruction, Run
from jaxmorph.runtime.executor import Executor


@dataclass(frozen=True)
class TimedExecutor(Executor):
    """An executor that notes how long enqueueing each instruction took.

    Attributes:
        times_s: By kind: of each instruction.
    """

    times_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def like(cls, executor: Executor) -> Self:
        """One that runs the same stage on the same queue."""
        return cls(**{each.name: getattr(executor, each.name) for each in fields(Executor)})

    def median_us(self) -> dict[str, float]:
        """By kind, in the order in which they first came; a transfer waits for its other end."""
        return {kind: 1e6 * median(times) for kind, times in self.times_s.items()}

    def _enqueue(self, instruction: Instruction, state: Any) -> None:
        began_s = time.perf_counter()
        super()._enqueue(instruction, state)
        is_op = isinstance(instruction, Run)
        kind = instruction.op.kind.value if is_op else type(instruction).__name__.lower()
        self.times_s[kind].append(time.perf_counter() - began_s)
