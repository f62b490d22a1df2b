"""The only loop over training steps, and the callbacks that act between two of them.

`jaxmorph train`, `jaxmorph compare` and the library's `Trainer` all run it.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmorph.program.instructions import RankProgram
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.step import StepResult, StepRunner


@dataclass(frozen=True)
class Effect:
    """What a callback asks of the loop, on all ranks alike.

    Attributes:
        program: This rank's instructions from the next step on; None: those that it has.
        paused_s: Time since the step that is part of no step.
        ends: No step comes after this one.
    """

    program: RankProgram | None = None
    paused_s: float = 0.0
    ends: bool = False


GOES_ON = Effect()


class Callback:
    """One rank's part of something that happens along with the steps."""

    def report(self, step: int) -> tuple[Any, ...]:
        """What this rank adds to its report of a step, once its gradients are there.

        Each part is a frozen dataclass whose fields all have defaults; `after` finds all ranks' of
        a kind by `StepResult.parts_of`.
        """
        del step
        return ()

    def after(self, result: StepResult) -> Effect:
        """Act on a step that is over; parameters are updated, and all ranks do the same."""
        del result
        return GOES_ON


class Loop:
    """Takes steps, one after another; all ranks make the same calls.

    A step lasts from the meeting that ends the one before to the meeting that ends it. The update
    and the callbacks come after the meeting: they are in the next step's time, but for pauses.

    Attributes:
        program: This rank's instructions in the next step.
        callbacks: All act on every step, in this order: also where one of them ends the loop.
        next_step: The number of the step to come.
        is_over: Whether a callback has ended the loop.
    """

    def __init__(
        self,
        runner: StepRunner,
        program: RankProgram,
        callbacks: Sequence[Callback] = (),
        next_step: int = 0,
    ) -> None:
        self.runner = runner
        self.program = program
        self.callbacks = callbacks
        self.next_step = next_step
        self.is_over = False
        self.begin()

    def begin(self) -> None:
        """Have the next step begin now."""
        self.began_s = time.monotonic()

    def step(self, inputs: StepInputs) -> StepResult:
        """Take a step, and have the callbacks act on it."""
        result = self.runner.run(
            self.program, inputs, self.next_step, began_s=self.began_s, report=self._report
        )
        self.began_s = result.ended_s
        self.next_step += 1
        for callback in self.callbacks:
            effect = callback.after(result)
            self.program = effect.program or self.program
            self.began_s += effect.paused_s
            self.is_over = self.is_over or effect.ends
        return result

    def run(self, inputs: Iterator[StepInputs], num_steps: int) -> bool:
        """Take all steps of a run; whether the last one has been done before the loop ended."""
        while self.next_step < num_steps and not self.is_over:
            self.step(next(inputs))
        return not self.is_over

    def _report(self, step: int) -> list[Any]:
        return [part for callback in self.callbacks for part in callback.report(step)]
