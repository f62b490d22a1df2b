"""What splitting the backward into B and W costs, against backwards that are not split.

    python -m benchmarks.split_cost [--json FILE]

Times one stage of GPT-2 layers: F, B, W and BW as compiled by `build_stage`, and a plain jitted
`jax.value_and_grad` of the same layers. Every backward adds its gradients into donated float32
accumulators. Repeats of all programs are interleaved, and medians are compared with the bars;
the exit code is 1 if one is missed.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax

from benchmarks.gpu.stage import Sizes, StageOps, build_gpt2, build_lone_stage, median_times_s
from benchmarks.results import Bar, finish, provenance

ON_CPU = {"(B+W)/BW": 1.20, "(F+BW)/plain": 1.10, "B/BW": 0.70, "compile 32/4 layers": 1.50}
ON_GPU = {**ON_CPU, "(B+W)/BW": 1.10, "(F+BW)/plain": 1.05}


def compile_s(sizes: Sizes, dtype: str) -> float:
    """Returns the seconds it takes to trace and compile a stage."""
    model = build_gpt2(sizes, dtype)
    start_s = time.perf_counter()
    build_lone_stage(model, sizes)
    return time.perf_counter() - start_s


def figures(settings: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Returns (figures that have a bar, what they were computed from)."""
    sizes = Sizes(
        width=settings.width,
        num_heads=settings.width // 64,
        num_layers=settings.layers,
        sequence_length=settings.sequence,
        microbatch_size=settings.microbatch,
    )
    model = build_gpt2(sizes, settings.dtype)
    programs = build_lone_stage(model, sizes)
    times_s = median_times_s(StageOps(model, programs, sizes), settings.repeats)
    ms = {name: 1e3 * time_s for name, time_s in times_s.items()}
    deep = {n: replace(sizes, num_layers=n) for n in (4, 32)}
    seconds = {n: min(compile_s(deep[n], settings.dtype) for _ in range(2)) for n in deep}
    ratios = {
        "(B+W)/BW": (ms["B"] + ms["W"]) / ms["BW"],
        "(F+BW)/plain": (ms["F"] + ms["BW"]) / ms["plain"],
        "B/BW": ms["B"] / ms["BW"],
        "compile 32/4 layers": seconds[32] / seconds[4],
    }
    measured = {f"{name}_ms": value for name, value in ms.items()}
    measured |= {f"compile_{n}_layers_s": value for n, value in seconds.items()}
    measured |= vars(programs.memory)
    return ratios, measured


def main() -> int:
    """Prints the table; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--microbatch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    settings = parser.parse_args()
    bars = ON_CPU if jax.default_backend() == "cpu" else ON_GPU
    values = provenance("benchmarks.split_cost")
    ratios, measured = figures(settings)
    for name, value in measured.items():
        print(f"{name:32} {value:12,.2f}")
    found = [Bar(name, ratios[name], at_most=bar) for name, bar in bars.items()]
    return finish(found, settings.json, values | measured)


if __name__ == "__main__":
    sys.exit(main())
