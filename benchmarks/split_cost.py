"""What splitting the backward into B and W costs, against backwards that are not split.

    python benchmarks/split_cost.py [--json FILE]

Times one stage of GPT-2 layers: F, B, W and BW as compiled by `build_stage`, and a plain jitted
`jax.value_and_grad` of the same layers. Every backward adds its gradients into donated float32
accumulators. Repeats of all programs are interleaved, and medians are compared with the bars;
the exit code is 1 if one is missed.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from jaxmorph.stage.build import StagePrograms, build_stage, init_stage_params
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from models.gpt2.config import GPT2Config
from models.gpt2.stages import GPT2

ON_CPU = {"(B+W)/BW": 1.20, "(F+BW)/plain": 1.10, "B/BW": 0.70, "compile 32/4 layers": 1.50}
ON_GPU = {**ON_CPU, "(B+W)/BW": 1.10, "(F+BW)/plain": 1.05}


def build(model: GPT2, num_layers: int, settings: argparse.Namespace) -> StagePrograms:
    """Compiles a stage in the middle of a pipeline."""
    return build_stage(
        model,
        stage_submesh(make_mesh(1), 0),
        num_layers=num_layers,
        is_first=False,
        is_last=False,
        microbatch_size=settings.microbatch,
        sequence_length=settings.sequence,
    )


def plain_step(model: GPT2) -> Callable[..., Any]:
    """Returns the layers' forward and whole backward as one program that knows no stages."""

    def loss(params: Any, x: jax.Array, gradient: jax.Array) -> jax.Array:
        layers = params["layers"]
        y, _ = jax.lax.scan(lambda x, layer: (model.layer(layer, x), None), x, layers)
        return jnp.vdot(y.astype(jnp.float32), gradient.astype(jnp.float32))

    def step(params: Any, x: jax.Array, gradient: jax.Array, sums: Any) -> Any:
        value, grads = jax.value_and_grad(loss, argnums=(0, 1))(params, x, gradient)
        return value, grads[1], jax.tree.map(jnp.add, sums, grads[0])

    return jax.jit(step, donate_argnums=3)


class Timed:
    """The programs on one microbatch, each of which can be timed once."""

    def __init__(self, model: GPT2, programs: StagePrograms, settings: argparse.Namespace):
        key = jax.random.key(0)
        layers = range(settings.layers)
        self._params = init_stage_params(model, key, layers, is_first=False, is_last=False)
        self._programs, self._weights = programs, programs.prepare(self._params)
        shape = (settings.microbatch, settings.sequence, settings.width)
        self._x = jax.random.normal(key, shape).astype(settings.dtype)
        self._plain = plain_step(model)
        self._sums = programs.zero_accumulators()
        _, self._stash = jax.block_until_ready(programs.forward(self._weights, self._x))
        self._weight_stash = programs.backward_input(self._weights, self._stash, self._x)[1]

    def run(self, name: str) -> float:
        """Returns the seconds of one call."""
        jax.block_until_ready((self._sums, self._weight_stash))
        start_s = time.perf_counter()
        jax.block_until_ready(getattr(self, f"_run_{name.lower()}")())
        return time.perf_counter() - start_s

    def _run_f(self) -> Any:
        return self._programs.forward(self._weights, self._x)

    def _run_b(self) -> Any:
        return self._programs.backward_input(self._weights, self._stash, self._x)

    def _run_w(self) -> Any:
        self._sums = self._programs.backward_weight(self._weights, self._weight_stash, self._sums)
        return self._sums

    def _run_bw(self) -> Any:
        result = self._programs.backward(self._weights, self._stash, self._x, self._sums)
        self._sums = result[1]
        return result

    def _run_plain(self) -> Any:
        result = self._plain(self._params, self._x, self._x, self._sums)
        self._sums = result[2]
        return result


def measure_ms(timed: Timed, repeats: int) -> dict[str, float]:
    """Returns the median of each program, with the repeats of all of them interleaved."""
    names = ("F", "B", "W", "BW", "plain")
    rounds = [{name: timed.run(name) for name in names} for _ in range(repeats + 2)][2:]
    return {name: 1e3 * median(each[name] for each in rounds) for name in names}


def compile_s(model: GPT2, num_layers: int, settings: argparse.Namespace) -> float:
    """Returns the seconds it takes to trace and compile a stage."""
    start_s = time.perf_counter()
    build(model, num_layers, settings)
    return time.perf_counter() - start_s


def figures(settings: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Returns (figures that have a bar, what they were computed from)."""
    sizes = GPT2Config(
        vocab_size=256,
        sequence_length=settings.sequence,
        width=settings.width,
        num_layers=32,
        num_heads=settings.width // 64,
        compute_dtype=settings.dtype,
    )
    model = GPT2(sizes)
    programs = build(model, settings.layers, settings)
    ms = measure_ms(Timed(model, programs, settings), settings.repeats)
    seconds = {n: min(compile_s(model, n, settings) for _ in range(2)) for n in (4, 32)}
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
    ratios, measured = figures(settings)
    for name, value in measured.items():
        print(f"{name:32} {value:12,.2f}")
    print(f"\n{'figure':32} {'measured':>12} {'at most':>8}")
    for name, bar in bars.items():
        verdict = "pass" if ratios[name] <= bar else "FAIL"
        print(f"{name:32} {ratios[name]:12.3f} {bar:8.2f}  {verdict}")
    if settings.json:
        settings.json.write_text(json.dumps({"ratios": ratios, "bars": bars, **measured}, indent=1))
    return int(any(ratios[name] > bar for name, bar in bars.items()))


if __name__ == "__main__":
    sys.exit(main())
