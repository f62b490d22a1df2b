"""What an instruction costs, and what of it the runtime adds, with small programs.

Even they are dozens of kernels each on a GPU, so the same programs are also run without executor
and queue.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmorph.gpu_check.report import Row
from jaxmorph.gpu_check.settings import CheckSettings, Sizes
from jaxmorph.gpu_check.whole_model import whole_model
from jaxmorph.program.instructions import Free, RankProgram, Run
from jaxmorph.program.lowering import lower
from jaxmorph.runtime.executor import Executor, StepInputs
from jaxmorph.runtime.queue import AsynchronousQueue, Pace
from jaxmorph.schedule.costs import StageCosts
from jaxmorph.schedule.fixed import FIXED_SCHEDULES
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.schedule.simulate import simulate
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
        prepare: What is called before each, and not counted.
    """
    times_s = []
    for _ in range(repeats):
        prepare()
        began_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - began_s)
    return 1e6 * median(times_s)


def _us(work: Callable[[], Any]) -> float:
    return microseconds(work, repeats=1)


def call_costs(
    stage: StagePrograms, weights: Any, batch: tuple[jax.Array, ...], gradient: Any, repeats: int
) -> dict[str, float]:
    """Microseconds until a call of each of a stage's programs returns, not until it has run.

    Args:
        stage: Its programs, those of F, B, W and BW.
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
    """What an instruction costs.

    Attributes:
        time_us: Microseconds by what was done.
    """

    time_us: dict[str, float]

    def rows(self) -> Iterator[Row]:
        """A row for each."""
        for name, value_us in self.time_us.items():
            yield Row(name, f"{value_us:.0f} us")


def measure_instructions(settings: CheckSettings) -> InstructionReport:
    """What an instruction costs: steps of one stage whose programs are small, on the device too.

    Args:
        settings: The model, and how often steps are run.
    """
    stage = _TinyStage(settings.tiny)
    try:
        steps = settings.num_instruction_steps
        found: dict[str, float] = {}
        for ops, schedule in _SCHEDULES.items():
            step_us, alone_us = stage.per_instruction_us(schedule, steps)
            found[f"a step of {ops}, per instruction"] = step_us
            found[f"{ops}: the same programs alone"] = alone_us
            found[f"{ops}: the runtime's part"] = step_us - alone_us
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

    def per_instruction_us(self, schedule_name: str, num_steps: int) -> tuple[float, float]:
        """The median step of a schedule, by the runtime and by its programs alone, in turns.

        Each is divided by the step's instructions, among which freeing doesn't count.
        """
        program = _program(schedule_name)
        counted = [step for step in program.instructions if not isinstance(step, Free)]
        ops = [step.op for step in counted if isinstance(step, Run)]
        inputs = StepInputs(self._tokens, self._tokens, 1.0)
        tokens = jax.device_put(self._tokens[0], self._placement)
        weight = jax.device_put(np.float32(1.0), self._placement)
        sums = (self._programs.zero_accumulators(),)

        def run_step() -> None:
            nonlocal sums
            outcome = self._executor.execute(program, (self._weights,), sums, inputs, step=0)
            sums = outcome.accumulators

        def run_alone() -> None:
            nonlocal sums
            sums = (self._run_alone(ops, tokens, weight, sums[0]),)

        rounds = [(_us(run_step), _us(run_alone)) for _ in range(num_steps + 1)][1:]
        step_us, alone_us = map(median, zip(*rounds, strict=True))
        return step_us / len(counted), alone_us / len(counted)

    def _run_alone(self, ops: Sequence[Op], tokens: jax.Array, weight: jax.Array, sums: Any) -> Any:
        """The programs of a step's ops in their order, on one microbatch that is there already."""
        stage, weights = self._programs, self._weights
        stashes: dict[int, Any] = {}
        marks = []
        for op in ops:
            match op.kind:
                case OpKind.F:
                    mark, stashes[op.microbatch] = stage.forward(weights, tokens, tokens)
                case OpKind.B:
                    stash = stashes.pop(op.microbatch)
                    mark, stashes[op.microbatch] = stage.backward_input(weights, stash, weight)
                case OpKind.W:
                    stash = stashes.pop(op.microbatch)
                    sums, mark = stage.backward_weight_marked(weights, stash, sums)
                case OpKind.BW:
                    stash = stashes.pop(op.microbatch)
                    _, sums, mark = stage.backward_marked(weights, stash, weight, sums)
            marks.append(mark)
        return jax.block_until_ready((sums, marks))[0]

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
