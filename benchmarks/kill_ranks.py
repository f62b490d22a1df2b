"""Whether a run survives kill -9: `python -m benchmarks.kill_ranks [--kills N] [--json FILE]`.

Trains a tiny model for 200 steps, once left in peace, and once with a random rank killed 20 times,
each at a random moment of its own stretch of steps. Then the parameters, the optimizer's state and
every step's loss must be the same bits, and no kill may cost more steps than lie between two
checkpoints. (Here writing a checkpoint takes less time than a step.) Says what a recovery takes,
by its phases. Linux only.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.head_of_line import Bar
from jaxmorph.records import StepRecord
from jaxmorph.report.run_directory import METRICS, read_records

ROOT = Path(__file__).parent.parent
STEPS, INTERVAL = 200, 5
_POLL_S = 0.01
_PATIENCE_S = 300.0
_CONFIG = {
    "run": {"steps": STEPS, "seed": 5},
    "model": {"preset": "tiny", "width": 32, "num_layers": 2, "num_heads": 2},
    "data": {"sequence_length": 16},
    "parallelism": {"stages": 2},
    "batch": {"microbatches": 4, "microbatch_size": 1},
    "schedule": {"name": "1f1b"},
    "emulation": {  # so that a step lasts long enough to be killed in, and to write meanwhile
        "accelerator": {"forward_ms": 20, "backward_input_ms": 20, "backward_weight_ms": 20}
    },
    "trace": {"every_steps": 0},
    "checkpoint": {"every_steps": INTERVAL},
    "restart_policy": {"backoff_s": 0.1},
}
Costs = list[dict[str, Any]]


def run(folder: Path, name: str, kills: int, rng: random.Random) -> Path:
    """Train in a directory of its own, and kill a random rank in each of so many stretches."""
    config, out = folder / "kill_ranks.yaml", folder / name
    config.write_text(json.dumps(_CONFIG))  # which is YAML too
    command = [sys.executable, "-m", "jaxmorph", "train", str(config), f"run.dir={out}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    for done, at in enumerate(kill_steps(rng, kills)):
        _await_step(process, out, at, done)
        time.sleep(rng.uniform(0.0, 0.2))  # somewhere in the steps that follow
        os.kill(rng.choice(_ranks(process.pid)), signal.SIGKILL)
    if process.wait() != 0:
        raise SystemExit(f"the run {name} failed: exit code {process.returncode}")
    return out


def kill_steps(rng: random.Random, kills: int) -> Iterator[int]:
    """After which steps to kill: one in each of equal stretches, none before a checkpoint."""
    first, all_of_them = 2 * INTERVAL, STEPS - 4 * INTERVAL
    for number in range(kills):
        yield round(first + (number + rng.random()) * all_of_them / kills)


def _await_step(process: subprocess.Popen[bytes], out: Path, step: int, recovered: int) -> None:
    """Wait until a run that has recovered from so many failures has recorded a step."""
    until_s = time.monotonic() + _PATIENCE_S
    while _last_step(out) < step or len(recoveries(out)) < recovered:
        if process.poll() is not None or time.monotonic() > until_s:
            raise SystemExit(f"step {step} did not come: exit code {process.returncode}")
        time.sleep(_POLL_S)


def _last_step(out: Path) -> int:
    steps = read_records(out / METRICS, StepRecord)
    return steps[-1].step if steps else -1


def _ranks(launcher: int) -> list[int]:
    tasks = Path(f"/proc/{launcher}/task").iterdir()
    return sorted(int(word) for task in tasks for word in (task / "children").read_text().split())


def same_bits(whole: Path, killed: Path) -> bool:
    """Whether two runs came to the same losses, parameters and optimizer state."""
    import jax

    from jaxmorph.checkpoints.folder import CheckpointFolder, stage_path
    from jaxmorph.checkpoints.tree_files import TreeFiles

    figures, states = [], []
    for run in (whole, killed):
        steps = read_records(run / METRICS, StepRecord)
        figures.append([(step.step, step.loss, step.grad_norm) for step in steps])
        last = CheckpointFolder(run / "checkpoints").finished(STEPS)
        trees = [TreeFiles().read(stage_path(last, stage)) for stage in range(2)]
        states.append([leaf.tobytes() for leaf in jax.tree.leaves(trees)])
    return figures[0] == figures[1] and states[0] == states[1] and len(figures[0]) == STEPS


def bars(whole: Path, killed: Path, kills: int) -> Iterator[Bar]:
    """What should hold of the two runs."""
    costs = recoveries(killed)
    yield Bar("restarts over kills", len(costs) / kills, least=1.0, most=1.0)
    yield Bar("the same bits in the end (1: yes)", float(same_bits(whole, killed)), least=1.0)
    lost = max(cost["steps_again"] for cost in costs)
    yield Bar("most steps that one kill has cost", lost, most=INTERVAL)


def recoveries(run: Path) -> Costs:
    """What each failure has cost that a run has recovered from."""
    file = run / "recovery.json"
    return json.loads(file.read_text())["recoveries"] if file.exists() else []


def phases(costs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The median of each phase of a recovery, and of all of it, a line each."""
    names = dict.fromkeys(name for cost in costs for name in cost["phases_s"])
    for name in names:
        lengths_s = [cost["phases_s"][name] for cost in costs if name in cost["phases_s"]]
        yield f"  {name.replace('_', ' '):12}{median(lengths_s):8.2f} s"
    yield f"  {'in all':12}{median(cost['total_s'] for cost in costs):8.2f} s"


def main() -> int:
    """Print a line per bar; 1 if one is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rng = random.Random(arguments.seed)
        whole = run(Path(folder), "whole", 0, rng)
        killed = run(Path(folder), "killed", arguments.kills, rng)
        found, costs = [*bars(whole, killed, arguments.kills)], recoveries(killed)
        goodput = [json.loads((out / "recovery.json").read_text())["goodput"]
                   for out in (killed, whole)]  # fmt: skip
    print(*found, sep="\n")
    print("a recovery, medians:", *phases(costs), sep="\n")
    print(f"goodput {goodput[0]:.1%}, {goodput[1]:.1%} left in peace; load {load:.1f} at the start")
    if arguments.json:
        values: dict[str, Any] = {
            bar.claim: {"value": bar.value, "holds": bar.holds} for bar in found
        }
        values |= {"recoveries": costs, "goodput": goodput, "load": load}
        arguments.json.write_text(json.dumps(values, indent=1))
    return 0 if all(bar.holds for bar in found) else 1


if __name__ == "__main__":
    sys.exit(main())
