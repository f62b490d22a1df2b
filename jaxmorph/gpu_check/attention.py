"""Whether cuDNN's attention computes what XLA's does, and what it saves."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmorph.gpu_check.report import Row
from jaxmorph.gpu_check.settings import CheckSettings, Sizes, build_gpt2
from jaxmorph.gpu_check.stage_ops import build_lone_stage, plain_step, random_activations
from jaxmorph.gpu_check.whole_model import whole_model
from jaxmorph.stage.build import StagePrograms
from jaxmorph.stage.model import Params
from jaxmorph.stage.parameters import init_stage_params

_NAMES = {"xla": "XLA", "cudnn": "cuDNN"}
_FACTOR = 2.0
_ROUNDING = 2.0**-8
"""Of a number in bfloat16."""


@dataclass(frozen=True)
class Found:
    """A model in bfloat16 with its attention computed in one way.

    Attributes:
        errors: Of the loss, and of each gradient: the norm of its difference from float32's, as a
            share of float32's norm.
        repeats: Whether the same step gives the same bits again.
        time_ms: Forward and backward of the stage's layers as plain JAX, the median.
    """

    errors: dict[str, float]
    repeats: bool
    time_ms: float


@dataclass(frozen=True)
class AttentionReport:
    """Attention by XLA and by cuDNN.

    Attributes:
        sizes: Of the model whose gradients are compared, in words.
        timed: Of the layers that are timed.
        found: By "xla", and by "cudnn" where that can be had.
        why_not: Why there is no cuDNN's; empty where there is.
        failed: Whether cuDNN's can be had, but has failed in a stage.
    """

    sizes: str
    timed: str
    found: dict[str, Found]
    why_not: str
    failed: bool

    def rows(self) -> Iterator[Row]:
        """Rows for each of both, and for what is asked of cuDNN's."""
        yield Row("model", "bfloat16", self.sizes)
        xla = self.found["xla"]
        for by, found in self.found.items():
            told = f"{_NAMES[by]}'s"
            yield Row(f"{told}: the same bits again", "yes" if found.repeats else "no")
            yield Row(f"{told}: forward, backward", f"{found.time_ms:.3f} ms", self.timed)
        if (cudnn := self.found.get("cudnn")) is None:
            yield Row("cuDNN's", "none", self.why_not, False if self.failed else None)
            return
        yield Row("cuDNN's time/XLA's", f"{cudnn.time_ms / xla.time_ms:.3f}")
        yield _error_row(cudnn.errors, xla.errors)


def _error_row(errors: Mapping[str, float], usual: Mapping[str, float]) -> Row:
    """The error that is largest against what it may be."""
    most = {name: _FACTOR * usual[name] + _ROUNDING for name in usual}
    worst = max(most, key=lambda name: errors[name] / most[name])
    # Whoever is NaN is never the largest.
    holds = all(errors[name] <= most[name] for name in most)
    note = f"at most {most[worst]:.1e}, XLA's is {usual[worst]:.1e}, of {len(most)}: {worst}"
    return Row("cuDNN's worst error to float32", f"{errors[worst]:.1e}", note, holds)


def measure_attention(settings: CheckSettings) -> AttentionReport:
    """How far a model's gradients in bfloat16 are from float32's, by both attentions, and how fast.

    Args:
        settings: The sizes of the model, and of the stage whose layers are timed.
    """
    sizes, stage = settings.parity, settings.stage
    batch, expected = _batch(sizes), _reference(sizes)
    found = {"xla": _look_at("xla", settings, batch, expected)}
    why_not, failed = _why_not(sizes, stage), False
    if not why_not:
        try:
            found["cudnn"] = _look_at("cudnn", settings, batch, expected)
        except Exception as error:  # XLA's is told all the same
            why_not = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            failed = True
    return AttentionReport(str(sizes), str(stage), found, why_not, failed)


def _why_not(*all_sizes: Sizes) -> str:
    for sizes in all_sizes:
        model = build_gpt2(sizes, "bfloat16")
        choice = model.attention(sizes.microbatch_size, sizes.sequence_length)
        if choice.why:
            return choice.why
    return ""


def _batch(sizes: Sizes) -> tuple[Any, Any]:
    rng, shape = np.random.default_rng(0), (2, sizes.microbatch_size, sizes.sequence_length)
    tokens, targets = rng.integers(sizes.vocab_size, size=shape, dtype=np.int32)
    return tokens, targets


def _reference(sizes: Sizes) -> dict[str, np.ndarray]:
    """A step in float32: parity holds its programs against plain JAX on the CPU."""
    whole = whole_model(sizes)
    return _step(whole.programs, whole.params, *_batch(sizes))


def _look_at(
    by: str, settings: CheckSettings, batch: tuple[Any, Any], expected: Mapping[str, np.ndarray]
) -> Found:
    sizes = settings.parity
    model = build_gpt2(sizes, "bfloat16", attention=by)
    programs = build_lone_stage(model, sizes, is_whole=True, kinds=("F", "B", "W"))
    params = whole_model(sizes).params
    first, again = (_step(programs, params, *batch) for _ in range(2))
    return Found(
        errors={name: _error(first[name], expected[name]) for name in expected},
        repeats=all(np.array_equal(first[name], again[name]) for name in first),
        time_ms=_plain_ms(by, settings),
    )


def _step(programs: StagePrograms, params: Params, tokens: Any, targets: Any) -> Any:
    """The loss and the gradients of a whole model by F, B and W, by name."""
    weights, weight = programs.prepare(params), jnp.float32(1 / targets.size)
    loss, stash = programs.forward(weights, tokens, targets)
    _, weight_stash = programs.backward_input(weights, stash, weight)
    sums = programs.backward_weight(weights, weight_stash, programs.zero_accumulators())
    named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(sums)}
    return {name: np.asarray(leaf, np.float64) for name, leaf in ({"loss": loss} | named).items()}


def _error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def _plain_ms(by: str, settings: CheckSettings) -> float:
    """The median of the time of a stage's layers, forward and backward in one program."""
    sizes = settings.stage
    model = build_gpt2(sizes, "bfloat16", attention=by)
    params = init_stage_params(model, jax.random.key(0), range(sizes.num_layers), False, False)
    x, step, times_s = random_activations(model, sizes), plain_step(model), []
    sums = jax.tree.map(jnp.zeros_like, params)
    for _ in range(settings.repeats + 2):
        began_s = time.perf_counter()
        for _ in range(settings.calls):
            _, _, sums = step(params, x, x, sums)
        jax.block_until_ready(sums)
        times_s.append((time.perf_counter() - began_s) / settings.calls)
    return 1e3 * median(times_s[2:])
