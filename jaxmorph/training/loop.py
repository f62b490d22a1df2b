"""The loop over training steps, and the callbacks that act between two steps.

`jaxmorph train`, `jaxmorph compare` and the library's `Trainer` all run this loop.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmorph.program.instructions import RankInstructions
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.step import StepResult, StepRunner


@dataclass(frozen=True)
class Effect:
    """What a callback asks of the loop; all ranks must ask the same.

    Attributes:
        program: This rank's instructions from the next step on; None: no change.
        paused_s: Time spent after the step that the next step's time leaves out.
        ends: Whether the loop ends after this step.
    """

    program: RankInstructions | None = None
    paused_s: float = 0.0
    ends: bool = False


GOES_ON = Effect()


class Callback:
    """Acts between steps, on one rank."""

    def report(self, step: int, took_s: float) -> tuple[Any, ...]:
        """Parts to add to this rank's report of a step, once its gradients are computed.

        Each part is a frozen dataclass whose fields all have defaults. In `after`,
        `StepResult.parts_of` returns every rank's part of one type.

        Args:
            took_s: How long the step has taken so far.
        """
        del step, took_s
        return ()

    def after(self, result: StepResult) -> Effect:
        """Act after the update; all ranks act alike."""
        del result
        return GOES_ON


class Loop:
    """Takes steps, one after another; all ranks make the same calls.

    A step ends when all ranks have exchanged their scalars, and the next one begins there. So the
    update and the callbacks are part of the next step's time, except for pauses.

    Attributes:
        program: This rank's instructions in the next step.
        callbacks: Called in this order after every step, even if one of them ends the loop.
        is_over: Whether a callback has ended the loop.
    """

    def __init__(
        self,
        runner: StepRunner,
        program: RankInstructions,
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
        """Count the next step's time from now."""
        self.began_s = time.monotonic()

    def step(self, inputs: StepInputs) -> StepResult:
        """Take a step, then call the callbacks."""
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
        """Take steps up to `num_steps`; False if a callback ended the loop."""
        while self.next_step < num_steps and not self.is_over:
            self.step(next(inputs))
        return not self.is_over

    def _report(self, step: int) -> list[Any]:
        took_s = time.monotonic() - self.began_s
        return [part for callback in self.callbacks for part in callback.report(step, took_s)]
