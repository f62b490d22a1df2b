"""What splitting the backward into B and W costs, against backwards that are not split.

    python -m benchmarks.split_cost [--json FILE]

Times one stage of GPT-2 layers: F, B, W and BW as compiled by `build_stage`, and a plain jitted
`jax.value_and_grad` of the same layers. Every backward adds its gradients into donated float32
accumulators. Then the split of every other model that comes with jaxmorph, and of those of
docs/examples. And one W for several microbatches (`schedule.weight_group`), of this stage and of
one with small microbatches. Repeats of all programs are interleaved, and medians are compared with
the bars; the exit code is 1 if one is missed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import jax

from benchmarks.gpu.stage import (
    OP_NAMES,
    WARM_UPS,
    Sizes,
    StageOps,
    build_gpt2,
    build_lone_stage,
)
from benchmarks.results import ROOT, Bar, finish, provenance
from jaxmorph.models import gpt2, llama
from jaxmorph.stage.build import OP_KINDS
from jaxmorph.stage.model import MicrobatchShapes

ON_CPU = {"(B+W)/BW": 1.20, "(F+BW)/plain": 1.10, "B/BW": 0.70, "compile 32/4 layers": 1.50}
ON_GPU = {**ON_CPU, "(B+W)/BW": 1.10, "(F+BW)/plain": 1.05}
GROUPS = (1, 2, 4)  # microbatches of one W
ARRAYS = 7  # sets: how fast an op is depends on where its arrays happen to lie in memory
Call = Callable[[], float]
"""Runs an op once, and returns the seconds it took."""


def compile_s(sizes: Sizes, dtype: str) -> float:
    """Returns the seconds it takes to trace and compile a stage."""
    model = build_gpt2(sizes, dtype)
    start_s = time.perf_counter()
    build_lone_stage(model, sizes)
    return time.perf_counter() - start_s


def sizes_of(settings: argparse.Namespace) -> Sizes:
    """Returns what the command line asks for."""
    return Sizes(
        width=settings.width,
        num_heads=settings.width // 64,
        num_layers=settings.layers,
        sequence_length=settings.sequence,
        microbatch_size=settings.microbatch,
    )


def median_times_ms(
    make_calls: Callable[[], Mapping[str, Call]], settings: argparse.Namespace
) -> dict[str, float]:
    """Returns the median milliseconds of calls that take turns, over several sets of arrays."""
    rounds = []
    for _ in range(ARRAYS):
        calls = make_calls()
        timed = [
            {name: call() for name, call in calls.items()}
            for _ in range(WARM_UPS + settings.repeats)
        ]
        rounds += timed[WARM_UPS:]
    return {name: 1e3 * median(each[name] for each in rounds) for name in rounds[0]}


def fresh_calls(names: Iterable[str], *of: Any, **more: Any) -> dict[str, Call]:
    """Returns the calls of ops on new arrays, those of `StageOps(*of, **more)`."""
    ops = StageOps(*of, **more)
    return {name: partial(ops.time_s, name, 1) for name in names}


def figures(settings: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Returns (figures that have a bar, what they were computed from)."""
    sizes = sizes_of(settings)
    model = build_gpt2(sizes, settings.dtype)
    programs = build_lone_stage(model, sizes)
    ms = median_times_ms(partial(fresh_calls, OP_NAMES, model, programs, sizes), settings)
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


def other_models(settings: argparse.Namespace) -> Iterator[tuple[str, Any, MicrobatchShapes]]:
    """Yields names, models as large as the GPT-2, and microbatches of theirs."""
    sys.path.append(str(ROOT / "docs" / "examples"))
    sizes = {"width": settings.width, "num_layers": settings.layers}
    own = {"preset": "tiny", "compute_dtype": settings.dtype, **sizes}
    text: dict[str, Any] = {**own, "sequence_length": settings.sequence, "vocab_size": 256}
    heads = {"num_heads": settings.width // 64}
    microbatch = MicrobatchShapes.of_text(settings.microbatch, settings.sequence)
    tokens = microbatch.inputs
    packed = MicrobatchShapes({"tokens": tokens, "positions": tokens}, tokens, {"segments": tokens})
    mixer, experts, encoder = map(import_module, ("causal_mixer", "moe_decoder", "patch_encoder"))
    yield "gpt2, dropout 0.1", gpt2.build(**text, **heads, dropout=0.1), microbatch
    yield "gpt2, packed", gpt2.build(**text, **heads), packed
    yield (
        "llama",
        llama.build(**text, **heads, num_key_value_heads=max(1, settings.width // 256)),
        microbatch,
    )
    yield "causal_mixer", mixer.build(**text), microbatch
    yield "moe_decoder", experts.build(**text, **heads, num_experts=4), microbatch
    patches = encoder.MOST_PATCHES
    images = encoder.build_data(
        batch_size=settings.microbatch * settings.sequence // patches, sequence_length=patches,
        seed=0,
    )  # fmt: skip
    data = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        (images.inputs(0), images.targets(0), images.extras(0)),
    )
    classifier = encoder.build(
        **own, **heads, sequence_length=patches, vocab_size=images.vocab_size
    )
    yield "patch_encoder", classifier, MicrobatchShapes(*data)


def other_figures(settings: argparse.Namespace, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Returns the milliseconds of F, B, W and BW of a middle stage of every other model."""
    found = {}
    for name, model, shapes in other_models(settings):
        programs = build_lone_stage(model, sizes, shapes=shapes)
        make_calls = partial(fresh_calls, OP_KINDS, model, programs, sizes, shapes)
        found[name] = median_times_ms(make_calls, settings)
    return found


def grouped_figures(settings: argparse.Namespace, sizes: Sizes) -> dict[str, float]:
    """Returns the milliseconds of B, BW, and W of each size of group, all of one microbatch."""
    model = build_gpt2(sizes, settings.dtype)
    programs = {group: build_lone_stage(model, sizes, weight_group=group) for group in GROUPS}

    def make_calls() -> dict[str, Call]:
        calls = fresh_calls(("B", "BW"), model, programs[1], sizes)
        for group, each in programs.items():
            own = fresh_calls(["W"], model, each, sizes, weight_group=group)
            calls[f"W{group}"] = own["W"]
        return calls

    ms = median_times_ms(make_calls, settings)
    return ms | {f"W{group}": ms[f"W{group}"] / group for group in GROUPS}


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
    parser.add_argument("--repeats", type=int, default=5, help="with each set of arrays")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    settings = parser.parse_args()
    bars = ON_CPU if jax.default_backend() == "cpu" else ON_GPU
    values = provenance("benchmarks.split_cost")
    ratios, measured = figures(settings)
    for name, value in measured.items():
        print(f"{name:32} {value:12,.2f}")
    found = [Bar(name, ratios[name], at_most=bar) for name, bar in bars.items()]
    others = other_figures(settings, sizes_of(settings))
    found += [
        Bar(f"(B+W)/BW of {name}", (ms["B"] + ms["W"]) / ms["BW"], at_most=bars["(B+W)/BW"])
        for name, ms in others.items()
    ]
    sizes = sizes_of(settings)
    small = replace(sizes, width=2 * sizes.width, sequence_length=sizes.sequence_length // 2)
    small = replace(small, num_heads=small.width // 64)
    grouped = {str(each): grouped_figures(settings, each) for each in (sizes, small)}
    for stage, ms in grouped.items():
        print(f"{stage}: {ms}")
    ms = grouped[str(sizes)]
    found += [
        Bar(f"(B+W)/BW, one W for {group}", (ms["B"] + ms[f"W{group}"]) / ms["BW"], at_most=1.0)
        for group in GROUPS[1:]
    ]
    values["grouped_ms"] = [{"stage": stage} | ms for stage, ms in grouped.items()]
    return finish(found, settings.json, values | measured | {"others_ms": others})


if __name__ == "__main__":
    sys.exit(main())
