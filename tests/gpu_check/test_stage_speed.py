"""What is asked of a stage's speed, and which attention it has."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from jaxmorph.gpu_check.settings import ON_CPU
from jaxmorph.gpu_check.stage_ops import OP_NAMES, MiddleStage, middle_stage
from jaxmorph.gpu_check.stage_speed import SpeedReport, lacks_cudnn
from models import attention

ASKED = "(F+BW)/plain"


def report_of(ratio, *, judged=True, failed=False):
    each: dict[str, float] = dict.fromkeys(OP_NAMES, 1.0)
    return SpeedReport(
        sizes="sizes",
        dtype="bfloat16",
        attention="xla",
        why="no engine" if failed else "",
        attention_failed=failed,
        time_ms=each,
        prepare_ms=1.0,
        model_tflops=each,
        mfu=None,
        ratios={"(B+W)/BW": 9.0, ASKED: ratio},
        judged=judged,
    )


def asked_of(report):
    return {row.name: row.holds for row in report.rows() if row.holds is not None}


@pytest.mark.parametrize(
    ("ratio", "holds"), [(0.9, True), (1.052, True), (1.053, False), (math.nan, False)]
)
def test_a_stage_has_95_percent_of_the_speed_of_plain_jax(ratio, holds):
    assert asked_of(report_of(ratio)) == {ASKED: holds}


def test_on_a_cpu_times_are_not_judged():
    assert asked_of(report_of(2.0, judged=False)) == {}


def test_attention_that_fails_in_a_stage_does_not_hold():
    assert asked_of(report_of(1.0, failed=True)) == {"attention by": False, ASKED: True}


def test_a_stage_that_cannot_have_cudnn_has_xlas_attention_and_says_why(monkeypatch):
    monkeypatch.setattr(attention, "why_not_cudnn", lambda *arguments: None)
    stage = middle_stage.__wrapped__(ON_CPU.stage, "bfloat16")
    assert (stage.attention, stage.failed) == ("xla", True)
    assert stage.why == "RuntimeError: cuDNN is not detected."
    assert set(stage.programs.compiled) >= {"F", "B", "W", "BW"}


@pytest.mark.parametrize(
    ("capability", "attention", "lacks"),
    [
        ("9.0", "xla", True),
        ("10.0", "xla", True),
        ("9.0", "cudnn", False),
        ("7.5", "xla", False),
        (None, "xla", False),
    ],
)
def test_a_gpu_that_cudnn_has_attention_for_must_have_it(capability, attention, lacks):
    nothing: Any = None
    device = SimpleNamespace(compute_capability=capability)
    assert lacks_cudnn(MiddleStage(nothing, nothing, attention, "no engine"), device) is lacks


def test_a_device_that_names_no_capability_lacks_nothing():
    nothing: Any = None
    assert not lacks_cudnn(MiddleStage(nothing, nothing, "xla"), SimpleNamespace())
