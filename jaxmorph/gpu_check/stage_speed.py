"""How fast a stage's programs are, against the same layers as plain JAX."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax

from jaxmorph.gpu_check.model_flops import model_flops, peak_tflops
from jaxmorph.gpu_check.report import Row
from jaxmorph.gpu_check.settings import CheckSettings
from jaxmorph.gpu_check.stage_ops import (
    OP_NAMES,
    MiddleStage,
    StageOps,
    median_times_s,
    middle_stage,
)

_MEANINGS = {
    "F": "forward",
    "B": "gradient of the input",
    "W": "gradient of the weights",
    "BW": "whole backward",
    "plain": "jitted value_and_grad",
}
_NAMES = {"cudnn": "cuDNN", "xla": "XLA"}
_LEAST_SHARE = 0.95
_CUDNN_SINCE = (8, 0)
"""The compute capability since which cuDNN has attention for the stage's sizes."""
_JUDGED = "(F+BW)/plain"


@dataclass(frozen=True)
class SpeedReport:
    """How fast a stage's programs are.

    Attributes:
        sizes: Of the stage, in words.
        attention: What computes it, "cudnn" or "xla".
        why: Why that isn't cuDNN; empty where it is.
        attention_failed: Whether it isn't cuDNN's, but should be.
        time_ms: Of each program on one microbatch, the median.
        prepare_ms: Of converting the weights, once for all microbatches of a step; plain JAX does
            so in every call.
        mfu: The same as a share of the device's peak; None where that isn't known.
        ratios: What the split costs, and what a stage costs against plain JAX.
        judged: Whether a stage must be as fast as plain JAX, but for a little: on a GPU.
    """

    sizes: str
    dtype: str
    attention: str
    why: str
    attention_failed: bool
    time_ms: dict[str, float]
    prepare_ms: float
    model_tflops: dict[str, float]
    mfu: dict[str, float] | None
    ratios: dict[str, float]
    judged: bool

    def rows(self) -> Iterator[Row]:
        """A row for each program, and one for each ratio."""
        yield Row("stage", self.dtype, self.sizes)
        failed = False if self.attention_failed else None
        yield Row("attention by", _NAMES[self.attention], self.why, failed)
        for name in OP_NAMES:
            speed = f"{self.model_tflops[name]:.3g} TFLOP/s"
            share = f", MFU {self.mfu[name]:.1%}" if self.mfu else ""
            yield Row(
                f"{name}: {_MEANINGS[name]}", f"{self.time_ms[name]:.3f} ms", f"{speed}{share}"
            )
        yield Row("prepare: weights", f"{self.prepare_ms:.3f} ms", "once a step")
        for name, ratio in self.ratios.items():
            yield self._judged(name, ratio) if name == _JUDGED else Row(name, f"{ratio:.3f}")

    def _judged(self, name: str, ratio: float) -> Row:
        most = 1 / _LEAST_SHARE
        where = "" if self.judged else "on a GPU "
        note = f"{where}at most {most:.3f}: {_LEAST_SHARE:.0%} of plain JAX's MFU"
        return Row(name, f"{ratio:.3f}", note, bool(ratio <= most) if self.judged else None)


def measure_speed(settings: CheckSettings) -> SpeedReport:
    """How fast F, B, W and BW are in bfloat16, and plain JAX on the same layers.

    Args:
        settings: The stage's sizes, repeats and calls.
    """
    sizes, dtype = settings.stage, "bfloat16"
    stage = middle_stage(sizes, dtype)
    ops = StageOps(stage.model, stage.programs, sizes)
    times_s = median_times_s(ops, settings.repeats, settings.calls)
    prepare_s = [ops.time_s("prepare", settings.calls) for _ in range(settings.repeats + 2)][2:]
    time_ms = {name: 1e3 * time_s for name, time_s in times_s.items()}
    prepare_ms = 1e3 * median(prepare_s)
    device = jax.devices()[0]
    flops, peak = model_flops(sizes, stage.attention), peak_tflops(device.device_kind)
    speed = {name: flops[name] / times_s[name] / 1e12 for name in OP_NAMES}
    return SpeedReport(
        sizes=str(sizes),
        dtype=dtype,
        attention=stage.attention,
        why=stage.why,
        attention_failed=lacks_cudnn(stage, device),
        time_ms=time_ms,
        prepare_ms=prepare_ms,
        model_tflops=speed,
        mfu={name: value / peak for name, value in speed.items()} if peak else None,
        ratios=_ratios(time_ms, prepare_ms),
        judged=device.platform != "cpu",
    )


def lacks_cudnn(stage: MiddleStage, device: Any) -> bool:
    """Whether a stage's attention isn't cuDNN's though the device is one that cuDNN has it for.

    Args:
        device: What it runs on, JAX's; one without a compute capability is no such device.
    """
    capability = getattr(device, "compute_capability", None) or "0.0"
    is_there = tuple(map(int, capability.split("."))) >= _CUDNN_SINCE
    return stage.failed or (is_there and stage.attention != "cudnn")


def _ratios(ms: Mapping[str, float], prepare_ms: float) -> dict[str, float]:
    return {
        "(B+W)/BW": (ms["B"] + ms["W"]) / ms["BW"],
        "(F+BW)/plain": (ms["F"] + ms["BW"]) / ms["plain"],
        "(F+B+W)/plain": (ms["F"] + ms["B"] + ms["W"]) / ms["plain"],
        "(prepare+F+BW)/plain": (prepare_ms + ms["F"] + ms["BW"]) / ms["plain"],
    }
