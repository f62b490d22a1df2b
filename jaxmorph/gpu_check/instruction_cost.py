"""The third part: what dispatching an instruction costs, with programs too small to count."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmorph.gpu_check.report import Row
from jaxmorph.gpu_check.settings import CheckSettings, Sizes
from jaxmorph.gpu_check.whole_model import whole_model
from jaxmorph.program.instructions import Free, RankProgram
from jaxmorph.program.lowering import lower
from jaxmorph.runtime.executor import Executor, StepInputs
from jaxmorph.runtime.pacing import Pace
from jaxmorph.runtime.queue import AsynchronousQueue
from jaxmorph.schedule.builders import FIXED_SCHEDULES
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.simulator import simulate
from jaxmorph.stage.build import StagePrograms
from jaxmorph.stage.mesh import make_mesh, stage_submesh

_MICROBATCHES = 16
_CALLS_PER_STEP = 10
_SCHEDULES = {"F, B, W": "zb-h2", "F, BW": "1f1b"}


def microseconds(
    work: Callable[[], Any], repeats: int, prepare: Callable[[], Any] = lambda: None
) -> float:
    """Median time of a call.

    Args:
        work: What is called.
        repeats: How often.
        prepare: What is called before each, and not counted.
    """
    times_s = []
    for _ in range(repeats):
        prepare()
        began_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - began_s)
    return 1e6 * median(times_s)


def call_costs(
    stage: StagePrograms, weights: Any, batch: tuple[jax.Array, ...], gradient: Any, repeats: int
) -> dict[str, float]:
    """Microseconds until a call of each of a stage's programs returns, not until it has run.

    Args:
        stage: Its programs, those of F, B, W and BW.
        weights: From its `prepare`.
        batch: What F takes.
        gradient: What B takes as the output's gradient.
        repeats: How often each is called.
    """
    _, stash = stage.forward(weights, *batch)
    _, weight_stash = stage.backward_input(weights, stash, gradient)
    sums = [stage.zero_accumulators()]

    def run_w() -> None:
        sums[0] = stage.backward_weight(weights, weight_stash, sums[0])

    def run_bw() -> None:
        sums[0] = stage.backward(weights, stash, gradient, sums[0])[1]

    calls = {
        "call F": lambda: stage.forward(weights, *batch),
        "call B": lambda: stage.backward_input(weights, stash, gradient),
        "call W": run_w,
        "call BW": run_bw,
    }

    def settle() -> None:
        jax.block_until_ready((sums[0], stage.forward(weights, *batch)))

    return {name: microseconds(call, repeats, settle) for name, call in calls.items()}


@dataclass(frozen=True)
class InstructionReport:
    """What dispatching an instruction costs.

    Attributes:
        time_us: Microseconds by what was done.
    """

    time_us: dict[str, float]

    def rows(self) -> Iterator[Row]:
        """A row for each."""
        for name, value_us in self.time_us.items():
            yield Row(name, f"{value_us:.0f} us")


def measure_instructions(settings: CheckSettings) -> InstructionReport:
    """What the runtime adds: steps of one stage whose programs do next to nothing.

    Args:
        settings: The model, and how often steps are run.
    """
    stage = _TinyStage(settings.tiny)
    try:
        steps = settings.num_instruction_steps
        found = {
            f"a step of {ops}, per instruction": stage.per_instruction_us(schedule, steps)
            for ops, schedule in _SCHEDULES.items()
        }
        return InstructionReport(found | stage.pieces_us(steps * _CALLS_PER_STEP))
    finally:
        stage.close()


class _TinyStage:
    """A whole model as one stage, with the runtime's executor and queue."""

    def __init__(self, sizes: Sizes) -> None:
        whole, submesh = whole_model(sizes), stage_submesh(make_mesh(1), 0)
        self._programs = whole.programs
        self._weights = whole.programs.prepare(whole.params)
        self._queue = AsynchronousQueue()
        self._placement = NamedSharding(submesh, PartitionSpec())
        self._executor = Executor(
            (self._programs,), self._placement, self._queue, {}, Pace(), transfer_timeout_s=60.0
        )
        shape = (_MICROBATCHES, sizes.microbatch_size, sizes.sequence_length)
        self._tokens = np.zeros(shape, np.int32)

    def per_instruction_us(self, schedule_name: str, num_steps: int) -> float:
        """The median step of a schedule, divided by its instructions; freeing doesn't count."""
        program = _program(schedule_name)
        counted = [step for step in program.instructions if not isinstance(step, Free)]
        inputs = StepInputs(self._tokens, self._tokens, 1.0)
        sums = (self._programs.zero_accumulators(),)

        def run_step() -> None:
            nonlocal sums
            outcome = self._executor.execute(program, (self._weights,), sums, inputs, step=0)
            sums = outcome.accumulators

        run_step()  # the first doesn't count
        return microseconds(run_step, num_steps) / len(counted)

    def pieces_us(self, repeats: int) -> dict[str, float]:
        """What such a step is made of."""
        tokens = jax.device_put(self._tokens[0], self._placement)
        weight = jax.device_put(np.float32(1.0), self._placement)
        calls = call_costs(self._programs, self._weights, (tokens, tokens), weight, repeats)
        place = microseconds(lambda: jax.device_put(self._tokens[0], self._placement), repeats)
        queue = microseconds(lambda: self._queue.enqueue("x", lambda: tokens), repeats)
        self._queue.drain()
        return {**calls, "place a microbatch's tokens": place, "keep the queue, per item": queue}

    def close(self) -> None:
        self._queue.close()


def _program(schedule_name: str) -> RankProgram:
    schedule = FIXED_SCHEDULES[schedule_name](1, _MICROBATCHES)
    costs = StageCosts.uniform(1, 1.0, 1.0, 1.0)
    return lower(schedule, simulate(schedule, costs))[0]
