"""The record of a step of a run that has a plan."""

from jaxmorph.records import StepRecord

STEP = StepRecord(
    step=0, loss=5.0, grad_norm=1.5, step_s=0.4, tokens_per_s=10_240.0, schedule="zb-h2",
    warmup_forwards=(3, 1), routes={"0-1": "direct"}, predicted_step_s=0.39, bubble_rate=0.125,
    peak_live=(3, 1), compilations=0, planned_bubble_rate=0.11,
)  # fmt: skip
