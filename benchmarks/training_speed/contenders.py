"""The contenders, and the commands that start them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.training_speed.worker import WorkerOptions

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Contender:
    """What is measured.

    Attributes:
        worker: The module of its processes; for jaxmorph the script.
        variant: Of `WorkerOptions`.
        num_cores: Of all of them together.
        alone: The name of the one-process run on one core that it is compared with.
    """

    name: str
    worker: str
    variant: str
    num_ranks: int
    num_cores: int
    alone: str = ""


PLAIN, PLAIN_TWO = "plain JAX", "plain JAX, two cores"
STAGE, STAGE_TWO = "jaxmorph, 1 stage", "jaxmorph, 1 stage, two cores"
STAGES_1F1B, STAGES_ZB = "jaxmorph, 1f1b", "jaxmorph, zb-h2"
SPECTRAX_1F1B, SPECTRAX_ZB = "SpectraX, Std1F1B", "SpectraX, ZeroBubbleH1"
TORCH, TORCH_1F1B, TORCH_ZB = "torch", "torch pipelining, 1F1B", "torch pipelining, ZB1P"


def of_jax(stages: int) -> tuple[Contender, ...]:
    """Plain JAX, and jaxmorph with one process a stage."""
    return (
        Contender(PLAIN, "plain_worker", "", 1, 1),
        Contender(STAGE, "jaxmorph_worker", "1f1b", 1, 1),
        Contender(PLAIN_TWO, "plain_worker", "", 1, 2),
        Contender(STAGE_TWO, "jaxmorph_worker", "1f1b", 1, 2),
        Contender(STAGES_1F1B, "jaxmorph_worker", "1f1b", stages, 2, alone=STAGE),
        Contender(STAGES_ZB, "jaxmorph_worker", "zb-h2", stages, 2, alone=STAGE),
    )


def of_spectrax() -> tuple[Contender, ...]:
    """One process, in which each stage is a device."""
    return (
        Contender(SPECTRAX_1F1B, "spectrax_worker", "Std1F1B", 1, 2, alone=PLAIN),
        Contender(SPECTRAX_ZB, "spectrax_worker", "ZeroBubbleH1", 1, 2, alone=PLAIN),
    )


def of_torch(stages: int) -> tuple[Contender, ...]:
    """One process alone, and one a stage."""
    return (
        Contender(TORCH, "torch_worker", "", 1, 1),
        Contender(TORCH_1F1B, "torch_worker", "1F1B", stages, 2, alone=TORCH),
        Contender(TORCH_ZB, "torch_worker", "ZB1P", stages, 2, alone=TORCH),
    )


def commands(
    contender: Contender, options: WorkerOptions, folder: Path, torch_python: str
) -> list[Sequence[str]]:
    """What starts a contender.

    Returns:
        One command for each process, or one for a launcher that starts them.
    """
    options = replace(
        options,
        variant=contender.variant,
        cores=options.cores[: contender.num_cores],
        num_ranks=contender.num_ranks,
    )
    if contender.worker == "jaxmorph_worker":
        script, stages = str(_HERE / f"{contender.worker}.py"), f"--stages={contender.num_ranks}"
        launch = [sys.executable, "-m", "jaxmorph", "launch", stages, f"--logs={folder}", script]
        return [[*launch, options.to_text()]]
    python = torch_python if contender.worker == "torch_worker" else sys.executable
    start = [python, "-m", f"benchmarks.training_speed.{contender.worker}"]
    return [[*start, replace(options, rank=r).to_text()] for r in range(contender.num_ranks)]
