"""Runs the contenders in turns: `python -m benchmarks.training_speed [--json FILE]`."""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.results import ROOT, finish, provenance
from benchmarks.training_speed.contenders import (
    Contender,
    commands,
    of_jax,
    of_spectrax,
    of_torch,
)
from benchmarks.training_speed.results import HEADER, bars, speeds
from benchmarks.training_speed.turns import ContenderError, Running, Turn, running
from benchmarks.training_speed.worker import WorkerOptions
from benchmarks.training_speed.workload import Workload, write_batches

_NUM_CORES = 2


def main() -> int:
    """Print the table and a line per bar; 1 if one is missed or a contender failed."""
    options = _parse()
    workload = Workload(width=options.width, num_layers=options.layers)
    torch_python = options.torch_python or _python_with("torch")
    contenders = [
        *of_jax(options.stages),
        *(of_spectrax() if _python_with("spectrax") else ()),
        *(of_torch(options.stages) if torch_python else ()),
    ]
    values = provenance("benchmarks.training_speed")
    print(f"{workload}; load average before: {values['load_before'][0]:.2f}", flush=True)
    print(f"{options.stages} stages; processes {'share' if options.unpinned else 'have'} cores")
    if not _python_with("spectrax"):
        print("SpectraX takes no part: pip install --no-deps spectrax-lib treescope")
    if not torch_python:
        print("torch is not installed, so it takes no part (or: --torch-python PATH)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        turns, failed = measure(workload, contenders, options, Path(folder), torch_python)
    ran = [each for each in contenders if each.name in turns]
    rows = speeds(ran, turns, options.steps * workload.tokens_per_step)
    kept = [*bars(ran, turns)]
    print(HEADER, *rows, "", sep="\n")
    values |= {"stages": options.stages, "pinned": not options.unpinned}
    values |= {"rows": [asdict(row) for row in rows]}
    return finish(kept, options.json, values) or int(failed)


def measure(
    workload: Workload,
    contenders: Sequence[Contender],
    options: argparse.Namespace,
    folder: Path,
    torch_python: str,
) -> tuple[dict[str, list[Turn]], bool]:
    """Let all contenders take their turns.

    Returns:
        (the turns of each that ran, but for those of a first round; whether one failed).
    """
    batches, params = folder / "batches.npy", folder / "params.npz"
    write_batches(batches, workload, (options.rounds + 1) * options.steps)
    module = "benchmarks.training_speed.write_params"
    make_params = [sys.executable, "-m", module, str(params), workload.to_text()]
    subprocess.run(make_params, cwd=ROOT, check=True)
    cores = sorted(os.sched_getaffinity(0))[:_NUM_CORES]
    with ExitStack() as stack:
        ready: dict[str, Running] = {}
        for number, contender in enumerate(contenders):
            address = folder / f"{number}"
            shared = WorkerOptions(
                address=str(address),
                workload=workload,
                batches=batches,
                cores=tuple(cores),
                variant="",
                params=params,
                rank=0,
                num_ranks=1,
                meeting=folder / f"{number}.meeting",
                num_stages=options.stages,
                pinned=not options.unpinned,
            )
            start = commands(contender, shared, folder / f"{number}.logs", torch_python)
            try:
                ready[contender.name] = stack.enter_context(
                    running(start, contender.num_ranks, folder, address)
                )
            except ContenderError as error:
                print(f"{contender.name}: FAILED: {error}", flush=True)
        rounds = [_round(ready, options.steps) for _ in range(options.rounds + 1)][1:]
    turns = {name: [turn[name] for turn in rounds] for name in ready}
    return turns, len(turns) < len(contenders)


def _round(ready: dict[str, Running], steps: int) -> dict[str, Turn]:
    """A turn of each; a contender that fails is removed."""
    turns: dict[str, Turn] = {}
    for name in [*ready]:
        try:
            turns[name] = ready[name].take_turn(steps)
        except ContenderError as error:
            print(f"{name}: FAILED: {error}", flush=True)
            del ready[name]
    return turns


def _python_with(package: str) -> str:
    return sys.executable if importlib.util.find_spec(package) else ""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_speed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--torch-python", default="", help="a Python that has torch and numpy")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument(
        "--unpinned", action="store_true", help="all processes of a contender share its cores"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of each contender in a round")
    parser.add_argument("--width", type=int, default=Workload.width)
    parser.add_argument("--layers", type=int, default=Workload.num_layers)
    options = parser.parse_args()
    if options.layers % options.stages:
        parser.error(
            f"got {options.layers} layers for {options.stages} stages, expected a multiple"
        )
    if not hasattr(os, "sched_getaffinity"):
        parser.error("got no means to confine a process to a core, expected Linux")
    if len(os.sched_getaffinity(0)) < _NUM_CORES:
        parser.error(f"got one core, expected {_NUM_CORES}: a process of a pipeline has its own")
    return options


if __name__ == "__main__":
    sys.exit(main())
