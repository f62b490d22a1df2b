"""Computes the held-out loss through the pipeline, between two steps.

An evaluation runs the forwards of the current plan, with the programs that training has compiled.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax

from jaxmorph.config import Config
from jaxmorph.data import Batches, Tokens
from jaxmorph.errors import UserError
from jaxmorph.program.check import check
from jaxmorph.program.instructions import RankInstructions
from jaxmorph.program.lowering import forward_only
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.step import StepResult, StepRunner
from jaxmorph.training.loop import Callback, Effect

_SEED = 0  # runs with different seeds evaluate the same text


class HeldOutLoss(NamedTuple):
    """The result of an evaluation.

    Attributes:
        loss: Mean loss of a held-out token; None if nothing was evaluated.
        took_s: How long it took; no step's time includes it.
    """

    loss: float | None
    took_s: float


NOT_EVALUATED = HeldOutLoss(None, 0.0)


def held_out_batches(
    config: Config, held_out: Tokens | None, separator: int | None = None
) -> Batches | None:
    """The batches that each evaluation computes; None if the run evaluates nothing.

    Args:
        separator: The token that ends a document, if documents are packed.
    """
    if held_out is None or config.evaluation.every_steps is None:
        return None
    batch, length = config.batch, config.data.sequence_length
    count = config.evaluation.batches
    needed = count * config.tokens_per_step + 1
    if held_out.ids.size < needed:
        raise UserError(
            f"data.held_out_fraction: got {config.data.held_out_fraction:g}, "
            f"{held_out.ids.size:,} tokens, expected at least {needed:,}: evaluation.batches, "
            f"{count}, of {config.tokens_per_step:,} tokens each, and one more token"
        )
    return Batches(
        held_out,
        microbatches=batch.microbatches,
        microbatch_size=batch.microbatch_size,
        sequence_length=length,
        seed=_SEED,
        separator=separator,
    )


class Evaluation(Callback):
    """Computes the held-out loss after some of a run's steps.

    Args:
        read: Returns what this rank's stage reads of a batch, by its number; None: never evaluate.

    Attributes:
        latest: The result after the last step; `NOT_EVALUATED` if no evaluation followed it.
    """

    def __init__(
        self,
        config: Config,
        runner: StepRunner,
        programs: Sequence[RankInstructions],
        read: Callable[[int], StepInputs] | None,
    ) -> None:
        self._config = config
        self._runner = runner
        self._rendezvous = runner.rendezvous
        self._read = read
        self._program: RankInstructions | None = None
        self._programs: list[tuple[int, RankInstructions]] = []
        self.latest = NOT_EVALUATED
        if read is not None:
            check([forward_only(program) for program in programs])

    def after(self, result: StepResult) -> Effect:
        """Evaluate if it is due, with the forwards of the instructions that ran."""
        self.latest = self._evaluated(result.step, result.program)
        return Effect(paused_s=self.latest.took_s)

    def _evaluated(self, step: int, program: RankInstructions) -> HeldOutLoss:
        read = self._read
        if read is None or not self._is_due(step):
            return NOT_EVALUATED
        self._use_forwards_of(program)
        # The update counts as step time: the evaluation begins when all ranks have done it.
        jax.block_until_ready(self._runner.stage.params)
        self._rendezvous.exchange({})
        began_s = time.monotonic()
        totals = [
            self._runner.forwards(
                forwards, replace(read(index), loss_weight=1.0, first_microbatch=first), step
            )
            for index, (first, forwards) in enumerate(self._programs)
        ]
        loss = sum(each.loss for each in totals) / sum(each.counted for each in totals)
        return HeldOutLoss(loss, time.monotonic() - began_s)

    def _use_forwards_of(self, program: RankInstructions) -> None:
        if program is self._program:
            return
        # A message carries its step and microbatch. An evaluation uses the number of the step
        # before it, so its microbatches are numbered after that step's.
        size = self._config.microbatches
        firsts = range(size, size * (1 + self._config.evaluation.batches), size)
        self._program = program
        self._programs = [(first, forward_only(program, first)) for first in firsts]

    def _is_due(self, step: int) -> bool:
        every = self._config.evaluation.every_steps
        is_last = step == self._config.run.steps - 1
        return every is not None and (is_last or (step + 1) % every == 0)
