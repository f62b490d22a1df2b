import pytest
from example_step import STEP

from jaxmorph.records import StepRecord
from jaxmorph.report.run_matrix import (
    JudgedBar,
    Matrix,
    PlannedRun,
    Provenance,
    Run,
    StepTimes,
)


@pytest.fixture
def step() -> StepRecord:
    """A step of a run that has a plan."""
    return STEP


def _planned(
    predicted_ms: float, regime: str = "holds queues", route: str = "direct"
) -> PlannedRun:
    return PlannedRun(
        predicted_ms=predicted_ms,
        lower_bound_ms=390.0,
        schedule="zb-h2",
        warmup_forwards=(3, 1),
        routes={"0-1": route},
        regime=regime,
    )


_SOUND = Run(
    system="zb", condition="healthy", step_ms=StepTimes(402.25, 399.0, 405.0, 20),
    plan=_planned(390.0), slowdown=1.0, bubble_rate=0.08, blocking_stall_rate=(0.01, 0.03),
    dependency_bubble_rate=(0.05, 0.07), other_idle_rate=(0.0, 0.0), loss=4.25, reference_ms=368.0,
    peak_on_device=(3, 1), load=(0.54, 1.2),
)  # fmt: skip
_NOISY = Run(
    system="zb", condition="slow", step_ms=StepTimes(1150.0, 900.0, 1400.0, 20),
    plan=_planned(1110.0), slowdown=2.859, bubble_rate=0.7, blocking_stall_rate=(0.4, 0.6),
    dependency_bubble_rate=(0.1, 0.1), other_idle_rate=(0.0, 0.0), loss=4.0, reference_ms=703.0,
    noisy="p90 / p10 is 1.556, above 1.15",
)  # fmt: skip
_FAILED = Run(
    system="adaptive-direct", condition="healthy", reference_ms=400.0,
    failed="0 of 20 steps measured: rank 1 failed: ended by SIGKILL\nits log: | here",
)  # fmt: skip
_MATRIX = Matrix(
    name="made up",
    systems=("zb", "adaptive-direct"),
    conditions=("healthy", "slow"),
    runs={(run.system, run.condition): run for run in (_SOUND, _NOISY, _FAILED)},
    reference_source="the paper",
    notes={"regime": "paced"},
    informed=("adaptive-direct",),
    bars=(
        JudgedBar("zb", "slow", "step", "prediction", None, 1.03, 1150 / 1110),
        JudgedBar("adaptive-direct", "slow", "step", "zb", None, 1.0, None),
    ),
    provenance=Provenance(
        command="jaxmorph compare x.yaml",
        commit="83890dd",
        date="2026-11-24 12:00 UTC",
        machine="2 processors",
        versions="jax 0.10.2",
        load_before=(0.1, 0.2, 0.3),
        configuration="5f" * 32,
    ),
)


@pytest.fixture
def made_up() -> Matrix:
    """A comparison with a good run, a noisy one, a failed one, and one to come."""
    return _MATRIX
