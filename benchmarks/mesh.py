"""What the axes of the mesh cost where nothing is paced: `python -m benchmarks.mesh [--json FILE]`.

Trains the demo's model on one device, and on two as stages, as replicas, and as devices of one
stage; all take turns. A step's time goes to the ops of the busiest stage, to that stage's waiting
until the last op has ended, and to the end of the step: sums over replicas, norms, the update. Then
what splitting the backward costs with two devices a stage, and what compiled programs take of a
device's memory beside what `--dry-run` forecasts. The exit code is 1 if a bar is missed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")

from benchmarks.gpu.stage import Sizes, StageOps, build_gpt2, build_lone_stage, median_times_s
from benchmarks.results import ROOT, Bar, finish, provenance
from jaxmorph.config import Config, load_config
from jaxmorph.placement import Replica
from jaxmorph.runtime.compiled_stage import compile_stage
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.stage.build import OP_KINDS
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.training.device_memory import needs_of_step
from jaxmorph.training.model_factory import build_model
from jaxmorph.training.open_stage import stage_settings

CONFIG = "configs/demo.yaml"
# A vocabulary that two devices can divide.
UNPACED = (
    "emulation.accelerator=null",
    "data.vocab_size=260",
    "trace.every_steps=1",
    "adaptation.enabled=false",
)
Mesh = tuple[int, int, int]
"""Stages, replicas, devices a stage."""

MESHES: tuple[Mesh, ...] = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2))
LARGER: tuple[Mesh, ...] = ((2, 1, 2), (1, 2, 2), (2, 2, 1), (2, 2, 2), (4, 1, 2))
"""Too many devices to be timed here; their memory is compared all the same."""
_STEPS, _FIRST = 30, 6  # steps before are left out
_MOST_SPLIT_COST = 1.20  # as `split_cost` asks of one device


@dataclass(frozen=True)
class Speed:
    """A mesh's median step.

    Args:
        ops_ms: Of the busiest stage.
        waits_ms: Until the last op of any stage has ended.
        end_ms: From then on.
    """

    mesh: str
    tokens_per_s: float
    step_ms: float
    ops_ms: float
    waits_ms: float
    end_ms: float


@dataclass(frozen=True)
class Memory:
    """Bytes on one device of a stage, as forecast and by its programs' memory analysis.

    Args:
        state: Parameters, gradients and optimizer state: what the update takes.
        stash: What F leaves for B of a microbatch, with its output.
        temporary: The most that F, B, W or BW takes besides.
    """

    mesh: str
    stage: int
    state: int
    state_of_programs: int
    stash: int
    stash_of_programs: int
    temporary: int
    temporary_of_programs: int


def overrides(mesh: Mesh) -> list[str]:
    """The configuration's keys for a mesh."""
    names = ("stages", "data", "tensor")
    return [f"parallelism.{name}={size}" for name, size in zip(names, mesh, strict=True)]


def trained(mesh: Mesh) -> Speed:
    """One run's median step, and where its time goes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = [f"run.steps={_STEPS}", f"run.dir={out}", *UNPACED, *overrides(mesh)]
        command = [sys.executable, "-m", "jaxmorph", "train", CONFIG, *words]
        environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        lines = [json.loads(each) for each in (out / "metrics.jsonl").read_text().splitlines()]
        steps = [_parts_ms(line, out) for line in lines[_FIRST:]]
    step_ms, ops_ms, waits_ms, end_ms = map(median, zip(*steps, strict=True))
    tokens = load_config(ROOT / CONFIG, UNPACED).tokens_per_step
    return Speed(in_words(mesh), 1e3 * tokens / step_ms, step_ms, ops_ms, waits_ms, end_ms)


def _parts_ms(line: dict[str, Any], out: Path) -> tuple[float, float, float, float]:
    events = json.loads((out / "trace" / f"step_{line['step']}.json").read_text())["traceEvents"]
    measured = next(
        each["pid"]
        for each in events
        if each["name"] == "process_name" and each["args"]["name"].startswith("measured")
    )
    ops = [each for each in events if each["pid"] == measured and each.get("cat") == "op"]
    last_ms = max(each["ts"] + each["dur"] for each in ops) / 1e3
    busy: dict[int, float] = {}
    for each in ops:
        busy[each["tid"]] = busy.get(each["tid"], 0.0) + each["dur"] / 1e3
    step_ms, ops_ms = 1e3 * line["step_s"], max(busy.values())
    return step_ms, ops_ms, last_ms - ops_ms, step_ms - last_ms


def in_words(mesh: Mesh) -> str:
    """Such as `2 stages`."""
    names = ("stages", "replicas", "devices")
    parts = [f"{size} {name}" for size, name in zip(mesh, names, strict=True) if size > 1]
    return ", ".join(parts) or "one device"


def split_cost(num_devices: int, repeats: int) -> dict[str, float]:
    """Milliseconds of F, B, W and BW of a stage whose parameters so many devices share."""
    sizes = Sizes(512, 8, num_layers=4, sequence_length=256, microbatch_size=1)
    model = build_gpt2(sizes, "float32")
    programs = build_lone_stage(model, sizes, num_devices=num_devices)
    ops = StageOps(model, programs, sizes, num_devices=num_devices)
    times_s = median_times_s(ops, repeats, names=OP_KINDS)
    return {kind: 1e3 * time_s for kind, time_s in times_s.items()}


def memory(mesh: Mesh, *, divided: bool = False) -> Iterator[Memory]:
    """Each stage's memory, as forecast and as its compiled programs say."""
    shard = ["optimizer.shard=data"] if divided else []
    config = load_config(ROOT / CONFIG, (*UNPACED, *overrides(mesh), *shard))
    model = build_model(config, 260)
    needs = needs_of_step(config, model)
    for stage in range(mesh[0]):
        yield _stage_memory(config, model, stage, needs, divided)


def _stage_memory(config: Config, model: Any, stage: int, needs: Any, divided: bool) -> Memory:
    cut, own = config.parallelism, needs.stages[stage]
    layers = cut_layers(model.num_layers, cut.stages, cut.layers, cut.chunks)
    settings = stage_settings(config, layers, stage, replica=Replica(0, cut.data))
    submesh = stage_submesh(make_mesh(1, cut.tensor), 0)
    compiled = compile_stage(model, settings, stage, submesh)
    (programs,) = compiled.programs_by_length[0]
    of_ops: dict[OpKind, Any] = {
        kind: programs.compiled[kind].memory_analysis() for kind in settings.kinds
    }
    update = compiled.optimizer.memory_analysis()
    is_last = stage == cut.stages - 1
    # At the end of a step; during ops all of them are there.
    gradient_bytes = own.gradient_bytes // (cut.data if divided else 1)
    sent = 4 if is_last else needs.message_bytes // cut.tensor  # a loss, or a part of activations
    words = in_words((cut.stages, cut.data, cut.tensor)) + ", divided optimizer" * divided
    return Memory(
        words,
        stage,
        own.parameter_bytes + gradient_bytes + own.optimizer_bytes,
        update.argument_size_in_bytes,
        own.stash.after_forward_bytes + sent,
        of_ops[OpKind.F].output_size_in_bytes,
        own.temporary_bytes,
        max(each.temp_size_in_bytes for each in of_ops.values()),
    )


def main() -> int:
    """Measure and print; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=25)
    settings = parser.parse_args()
    values = provenance("benchmarks.mesh")
    rounds = [[trained(mesh) for mesh in MESHES] for _ in range(settings.rounds)]
    speeds = [sorted(of, key=lambda each: each.step_ms)[len(of) // 2] for of in zip(*rounds)]  # noqa: B905
    memories = [
        each
        for mesh in (*MESHES, *LARGER)
        for divided in ((False, True) if mesh[1] > 1 else (False,))
        for each in memory(mesh, divided=divided)
    ]
    split_ms = {str(number): split_cost(number, settings.repeats) for number in (1, 2)}
    _print(speeds, memories, split_ms)
    bars = [
        Bar(
            f"(B+W)/BW with {number} devices a stage",
            (ms["B"] + ms["W"]) / ms["BW"],
            at_most=_MOST_SPLIT_COST,
        )
        for number, ms in split_ms.items()
    ]
    for name in ("state", "stash"):
        ratios = [getattr(it, f"{name}_of_programs") / getattr(it, name) for it in memories]
        bars.append(Bar(f"{name}: programs over forecast, least", min(ratios), at_least=0.99))
        bars.append(Bar(f"{name}: programs over forecast, most", max(ratios), at_most=1.01))
    ratios = [it.temporary_of_programs / it.temporary for it in memories]
    bars.append(Bar("temporary buffers: programs over forecast, most", max(ratios), at_most=1.25))
    found = {"speeds": [*map(asdict, speeds)], "memory": [*map(asdict, memories)]}
    return finish(bars, settings.json, values | found | {"split_ms": split_ms})


def _print(
    speeds: list[Speed], memories: list[Memory], split_ms: dict[str, dict[str, float]]
) -> None:
    for each in speeds:
        print(
            f"{each.mesh:16}{each.tokens_per_s:8,.0f} tokens/s{each.step_ms:8.1f} ms a step: "
            f"{each.ops_ms:.1f} ops, {each.waits_ms:.1f} waiting, {each.end_ms:.1f} its end"
        )
    for number, ms in split_ms.items():
        times = ", ".join(f"{kind} {value:.1f}" for kind, value in ms.items())
        print(f"{number} devices a stage: {times} ms")
    for each in memories:
        print(
            f"{each.mesh}, stage {each.stage}: state {each.state_of_programs:,} (forecast "
            f"{each.state:,}), stash {each.stash_of_programs:,} ({each.stash:,}), temporary "
            f"{each.temporary_of_programs:,} ({each.temporary:,})"
        )


if __name__ == "__main__":
    sys.exit(main())
