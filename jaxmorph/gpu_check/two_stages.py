"""Training by two processes that share the device as two stages, all delegated."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmorph.gpu_check.one_device import train_plainly
from jaxmorph.gpu_check.report import Row
from jaxmorph.gpu_check.settings import CheckSettings
from jaxmorph.gpu_check.stage_processes import NotJoined, run_joined
from jaxmorph.gpu_check.stage_task import StageTask
from jaxmorph.gpu_check.training_difference import TrainingDifference, compare_training


@dataclass(frozen=True)
class TwoStagesReport:
    """Training by two stages, compared with that of one device.

    Attributes:
        sizes: Of the model, in words.
        not_joined: Why JAX hasn't joined the processes; None where it has.
        losses: The two stages', of every step.
        difference: How far they are from one device.
        step_ms: The median of a step on the slower of the stages.
        one_device_step_ms: The same of a step on one device, in plain JAX.
        waiting: For each stage, the share of a step in which it had no op to run.
        copies: For each stage how messages were copied, with counts, and what it has warned of.
    """

    sizes: str
    not_joined: NotJoined | None
    losses: list[float]
    difference: TrainingDifference
    step_ms: float
    one_device_step_ms: float
    waiting: list[float]
    copies: list[dict[str, Any]]

    def rows(self) -> Iterator[Row]:
        """The comparison, then what it took."""
        yield Row("model", "float32", self.sizes)
        if self.not_joined is None:
            yield Row("processes joined by", "jax.distributed")
        else:
            yield Row("processes joined by", "nothing", self.not_joined.reason)
        yield from self.difference.rows()
        loss = f"{self.losses[-1]:.3f}"
        yield Row("loss of the last step", loss, f"{self.losses[0]:.3f} of the first")
        one = f"{self.one_device_step_ms:.1f} ms on one device, in plain JAX"
        yield Row("a step", f"{self.step_ms:.1f} ms", one)
        for stage, share in enumerate(self.waiting):
            yield Row(f"stage {stage}: no op to run", f"{share:.0%}", "of a step")
        yield from copy_rows(self.copies)


def copy_rows(copies: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """A row for each stage and direction: how messages were copied.

    Args:
        copies: Each stage's `DelegatedRoute.statistics`, with its `warnings`.
    """
    for stage, told in enumerate(copies):
        yield Row(f"stage {stage}: into slots by", told["tier"], "; ".join(told["warnings"]))
        yield Row(f"stage {stage}: out of slots by", told["landing_tier"])


def measure_two_stages(settings: CheckSettings) -> TwoStagesReport:
    """Train a model in two processes, and on one device, and compare.

    Args:
        settings: The model's sizes, and how many steps.
    """
    sizes, num_steps = settings.parity, settings.num_training_steps
    stages, not_joined = run_joined(StageTask("train", True, sizes, num_steps), settings.left_s)
    plain = train_plainly(sizes, num_steps)
    figures = [stage.figures for stage in stages]
    return TwoStagesReport(
        str(sizes),
        not_joined,
        figures[0]["losses"],
        compare_training(stages, plain),
        step_ms=max(each["step_ms"] for each in figures),
        one_device_step_ms=plain.step_ms,
        waiting=[each["waiting"] for each in figures],
        copies=[each["copies"] for each in figures],
    )
