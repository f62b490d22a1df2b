"""A small run of four stages, as a user runs it, which several tests share."""

import fcntl
import os
import subprocess
import sys

from in_this_process import ROOT
from stopped_run import SAVES

JAXMORPH = (sys.executable, "-m", "jaxmorph")
LIMIT_S = 150
CONFIG = """
run: {steps: 20, seed: 5}
model: {preset: tiny, width: 32, num_layers: 4, num_heads: 2}
data: {sequence_length: 16}
parallelism: {stages: 4}
batch: {microbatches: 8, microbatch_size: 2}
schedule: {name: zb-h2}
optimizer: {learning_rate: 1e-3}
trace: {every_steps: 10}
checkpoint: {every_steps: 0}
restart_policy: {compilation_cache: true}
"""


def arguments_of(folder, *overrides):
    """The arguments of a run of CONFIG in a folder of its own."""
    path = folder / "run.yaml"
    path.write_text(CONFIG)
    return ["train", str(path), f"run.dir={folder / 'out'}", *overrides]


def run_whole(folder, environment):
    """Run CONFIG with checkpoints as a separate command; its output and directory.

    Processes that share the folder run it once.
    """
    folder.mkdir(exist_ok=True)
    output = folder / "output"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            done = subprocess.run(
                [*JAXMORPH, *arguments_of(folder, SAVES)], env=os.environ | environment,
                cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            output.write_text(done.stdout)
    return output.read_text(), folder / "out"
