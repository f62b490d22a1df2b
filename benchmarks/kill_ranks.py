"""Whether a run survives kill -9: `python -m benchmarks.kill_ranks [--kills N] [--json FILE]`.

Trains a tiny model for 200 steps, once left in peace, and once with a random rank killed 20 times,
each at a random moment of its own stretch of steps. Then the parameters, the optimizer's state and
every step's loss must be the same bits, and no kill may cost more steps than lie between two
checkpoints. Says what a recovery takes, by its phases. Linux only.
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
    "emulation": {  # so that a step lasts long enough to be killed in
        "accelerator": {"forward_ms": 5, "backward_input_ms": 5, "backward_weight_ms": 5}
    },
    "trace": {"every_steps": 0},
    "checkpoint": {"every_steps": INTERVAL},
    "restart_policy": {"backoff_s": 0.1},
}
Lines = list[dict[str, Any]]


def start(folder: Path, name: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Begin to train in a directory of its own."""
    config, out = folder / "kill_ranks.yaml", folder / name
    config.write_text(json.dumps(_CONFIG))  # which is YAML too
    command = [sys.executable, "-m", "jaxmorph", "train", str(config), f"run.dir={out}"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL), out


def kill_again_and_again(run: subprocess.Popen[bytes], out: Path, kills: int, seed: int) -> int:
    """Kill a random rank in each of so many stretches of the run.

    Returns:
        How many have been killed.
    """
    rng, done = random.Random(seed), 0
    for at in kill_steps(rng, kills):
        if not _await_step(run, out, at):
            break
        time.sleep(rng.uniform(0.0, 0.2))  # somewhere in the steps that follow
        ranks = _ranks(run.pid)
        if len(ranks) == 2:  # else one has just ended by itself
            os.kill(rng.choice(ranks), signal.SIGKILL)
            done += 1
    return done


def kill_steps(rng: random.Random, kills: int) -> Iterator[int]:
    """After which steps to kill: one in each of equal stretches, none before a checkpoint."""
    first, stretch = 2 * INTERVAL, (STEPS - 4 * INTERVAL) / kills
    yield from (round(first + (number + rng.random()) * stretch) for number in range(kills))


def _await_step(run: subprocess.Popen[bytes], out: Path, step: int) -> bool:
    """Wait until a step is told; False once the run has ended."""
    until_s = time.monotonic() + _PATIENCE_S
    while run.poll() is None:
        if time.monotonic() > until_s:
            raise SystemExit(f"step {step} did not come within {_PATIENCE_S:g} s")
        if (out / "metrics.jsonl").exists() and _last_step(out) >= step:
            return True
        time.sleep(_POLL_S)
    return False


def _last_step(out: Path) -> int:
    lines = read_lines(out / "metrics.jsonl")
    return lines[-1]["step"] if lines else -1


def _ranks(launcher: int) -> list[int]:
    tasks = Path(f"/proc/{launcher}/task").iterdir()
    return sorted(int(word) for task in tasks for word in (task / "children").read_text().split())


def read_lines(path: Path) -> Lines:
    """Every line there is; one that is being written doesn't end yet."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def same_bits(whole: Path, killed: Path) -> bool:
    """Whether two runs came to the same losses, parameters and optimizer state."""
    import jax

    from jaxmorph.checkpoints.folder import CheckpointFolder, stage_path
    from jaxmorph.checkpoints.tree_files import TreeFiles

    told, states = [], []
    for run in (whole, killed):
        lines = read_lines(run / "metrics.jsonl")
        told.append([(line["step"], line["loss"], line["grad_norm"]) for line in lines])
        last = CheckpointFolder(run / "checkpoints").finished(STEPS)
        trees = [TreeFiles().read(stage_path(last, stage)) for stage in range(2)]
        states.append([leaf.tobytes() for leaf in jax.tree.leaves(trees)])
    return told[0] == told[1] and states[0] == states[1] and len(told[0]) == STEPS


def bars(whole: Path, killed: Path, kills: int) -> Iterator[Bar]:
    """What should hold of the two runs."""
    costs = recoveries(killed)
    yield Bar("ranks killed", kills, least=20.0)
    yield Bar("restarts over kills", len(costs) / max(1, kills), least=1.0)
    yield Bar("the same bits in the end (1: yes)", float(same_bits(whole, killed)), least=1.0)
    lost = max(cost["steps_again"] for cost in costs)
    yield Bar("most steps that one kill has cost", lost, most=2 * INTERVAL - 1)


def recoveries(run: Path) -> Lines:
    """What its failures have cost."""
    return json.loads((run / "recovery.json").read_text())["recoveries"]


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
        run, whole = start(Path(folder), "whole")
        run.wait()
        run, killed = start(Path(folder), "killed")
        kills = kill_again_and_again(run, killed, arguments.kills, arguments.seed)
        if run.wait() != 0:
            raise SystemExit(f"the run that was killed in failed: exit code {run.returncode}")
        found, costs = [*bars(whole, killed, kills)], recoveries(killed)
        books = {name: json.loads((out / "recovery.json").read_text()) for name, out in (
            ("whole", whole), ("killed", killed))}  # fmt: skip
    print(*found, sep="\n")
    print("a recovery, medians:", *phases(costs), sep="\n")
    print(
        f"goodput {books['killed']['goodput']:.1%}, {books['whole']['goodput']:.1%} left in peace"
    )
    print(f"load {load:.1f} at the start")
    if arguments.json:
        values = {bar.claim: {"value": bar.value, "holds": bar.holds} for bar in found}
        arguments.json.write_text(json.dumps(values | {"books": books, "load": load}, indent=1))
    return 0 if all(bar.holds for bar in found) else 1


if __name__ == "__main__":
    sys.exit(main())
