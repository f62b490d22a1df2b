"""Microseconds per instruction, and where they go: `python -m benchmarks.dispatch [--json FILE]`.

Two ranks run a tiny model, whose computation costs next to nothing. The rest of a step is the
runtime's own: calling a compiled program, moving a message, keeping the queue.
"""

import argparse
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any, Self

from benchmarks.results import provenance, write_json
from jaxmorph.program.instructions import Instruction, Payload, Run, Transfer
from jaxmorph.runtime.executor import Executor, StepInputs
from jaxmorph.runtime.launcher import run_ranks
from jaxmorph.runtime.rank_process import LauncherLink, RankArguments, run_rank
from jaxmorph.stage.model import MicrobatchShapes

REPEATS, MICROBATCHES = 200, 16


@dataclass(frozen=True)
class TimedExecutor(Executor):
    """An executor that notes how long the dispatching thread took to enqueue each instruction.

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


def call_costs(
    stage: Any, weights: Any, batch: tuple[Any, ...], gradient: Any, repeats: int
) -> dict[str, float]:
    """Microseconds until a call of each of a stage's programs returns, not until it has run.

    Args:
        stage: Its compiled programs, those of F, B, W and BW.
        gradient: What B takes as the output's gradient.
        repeats: How often each is called.
    """
    import jax

    _, stash, *_ = stage.forward(weights, *batch)
    _, weight_stash, _ = stage.backward_input(weights, stash, gradient)
    sums = [stage.zero_accumulators()]

    def run_w() -> None:
        sums[0], _ = stage.backward_weight(weights, (weight_stash,), sums[0])

    def run_bw() -> None:
        _, sums[0], _ = stage.backward(weights, stash, gradient, sums[0])

    calls = {
        "call F": lambda: stage.forward(weights, *batch),
        "call B": lambda: stage.backward_input(weights, stash, gradient),
        "call W": run_w,
        "call BW": run_bw,
    }

    def settle() -> None:
        jax.block_until_ready((sums[0], stage.forward(weights, *batch)))

    return {name: microseconds(call, repeats, settle) for name, call in calls.items()}


def measure(arguments: RankArguments, link: LauncherLink, rest: list[str]) -> None:
    """One of the two ranks; both make the same transfers, and rank 0 reports the figures."""
    import jax
    import numpy as np

    from jaxmorph.models.gpt2 import build
    from jaxmorph.program.lowering import lower
    from jaxmorph.runtime.join import Joining, join_run
    from jaxmorph.runtime.optimizer import OptimizerSettings
    from jaxmorph.runtime.queue import AsynchronousQueue
    from jaxmorph.runtime.routes import TransferIdentity
    from jaxmorph.runtime.stage_settings import StageSettings
    from jaxmorph.runtime.stage_trainer import StageTrainer
    from jaxmorph.schedule.costs import StageCosts
    from jaxmorph.schedule.fixed import FIXED_SCHEDULES
    from jaxmorph.schedule.ops import OpKind
    from jaxmorph.schedule.simulate import simulate

    rendezvous = join_run(arguments, Joining(60, 60))
    model = build(
        preset="tiny", sequence_length=8, vocab_size=32, width=16, num_layers=2, num_heads=2
    )
    settings = StageSettings(
        layers=(range(1), range(1, 2)),
        shapes=MicrobatchShapes.of_text(1, 8),
        seed=0,
        kinds=frozenset(OpKind),
        optimizer=OptimizerSettings(1e-3, 0, 10),
    )
    trainer = StageTrainer(model, settings, arguments.rank)
    (stage,), executor = trainer.programs, trainer.executor
    tokens = np.zeros((MICROBATCHES, 1, 8), np.int32)
    inputs = StepInputs(tokens, tokens, 1.0)
    figures: dict[str, float] = {}

    schedule = FIXED_SCHEDULES["zb-h2"](2, MICROBATCHES)
    costs = StageCosts.uniform(2, 1.0, 1.0, 1.0)
    program = lower(schedule, simulate(schedule, costs), num_tied=1)[arguments.rank]

    def median_step_s() -> float:
        steps_s = []
        for step in range(REPEATS // 10):
            rendezvous.exchange({})
            began_s = time.perf_counter()
            trainer.run(program, inputs, step)
            steps_s.append(time.perf_counter() - began_s)
            trainer.discard()
        return median(steps_s)

    figures["a step, per instruction"] = 1e6 * median_step_s() / len(program.instructions)
    trainer.executor = timed = TimedExecutor.like(executor)
    median_step_s()
    figures |= {f"dispatch in a step: {kind}": us for kind, us in timed.median_us().items()}

    weights = stage.prepare(trainer.params[0])
    placed = jax.device_put(tokens[0], executor.placement)
    figures["place a microbatch's tokens"] = microseconds(
        lambda: jax.device_put(tokens[0], executor.placement), REPEATS
    )
    if arguments.rank == 0:
        gradient, *_ = stage.forward(weights, placed)
        figures |= call_costs(stage, weights, (placed,), gradient, REPEATS)
    queue = AsynchronousQueue()
    figures["keep the queue, per item"] = microseconds(
        lambda: queue.enqueue("x", lambda: placed), REPEATS
    )
    queue.drain()
    queue.close()

    route = executor.routes["direct"]
    identity = TransferIdentity(0, 0, Transfer(Payload.ACTIVATION, 0, 1, 0))
    value = jax.device_put(np.zeros((1, 8, 16), np.float32), executor.placement)
    rendezvous.exchange({})
    figures["move a message of 512 bytes"] = microseconds(
        lambda: jax.block_until_ready(
            route.post(identity, value, 0.0).value
            if arguments.rank == 0
            else route.take(identity, 0.0, math.inf).value
        ),
        REPEATS,
    )
    figures["meet all ranks"] = microseconds(lambda: rendezvous.exchange({}), REPEATS)
    trainer.close()
    if arguments.rank == 0:
        link.send({"kind": "figures", "figures": figures})


def main() -> int:
    """Launch the ranks and print rank 0's figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    values = provenance("benchmarks.dispatch")
    messages: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        run_ranks("benchmarks.dispatch", [], 2, Path(folder), messages.append)
    (figures,) = (message["figures"] for message in messages)
    print(f"load average before: {values['load_before'][0]:.2f}")
    for name, value_us in figures.items():
        print(f"{name:32}{value_us:8.0f} us")
    if arguments.json:
        write_json(arguments.json, values | figures)
    return 0


if __name__ == "__main__":
    if any(word.startswith("--rank=") for word in sys.argv):
        run_rank(measure)
    else:
        sys.exit(main())
