"""A rank of jaxmorph: a script with a `jaxmorph.Trainer`, started by `jaxmorph launch`."""

import numpy as np

import jaxmorph
from benchmarks.training_speed.worker import WorkerOptions, serve
from benchmarks.training_speed.workload import VOCAB_SIZE, Workload
from jaxmorph.models.gpt2 import build
from jaxmorph.training.script_launch import launch_arguments


def config(workload: Workload, schedule: str, num_stages: int) -> dict:
    """The trainer's configuration."""
    return {
        "run": {"seed": 0, "steps": 1000},
        "data": {"sequence_length": workload.sequence_length},
        "parallelism": {"stages": num_stages},
        "batch": {
            "microbatches": workload.microbatches,
            "microbatch_size": workload.microbatch_size,
        },
        "schedule": {"name": schedule},
        "optimizer": {
            "learning_rate": workload.learning_rate,
            "final_learning_rate_fraction": 1.0,
            "warmup_steps": 0,
            "weight_decay": workload.weight_decay,
            "beta1": workload.beta1,
            "beta2": workload.beta2,
            "clip_norm": workload.clip_norm,
        },
        "timeouts": {"start_s": 300.0, "step_s": 300.0},
    }


class JaxmorphLoop:
    """A `Trainer` that trains the workload."""

    def __init__(self, options: WorkerOptions) -> None:
        workload = options.workload
        model = build(
            preset="tiny",
            sequence_length=workload.sequence_length,
            vocab_size=VOCAB_SIZE,
            width=workload.width,
            num_layers=workload.num_layers,
            num_heads=workload.num_heads,
            tied=False,
        )
        settings = config(workload, options.variant, options.num_ranks)
        self._trainer = jaxmorph.Trainer(model, settings)

    def step(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """Train on a batch; the loss."""
        return self._trainer.step((tokens, targets)).loss

    def finish(self, losses: list[float]) -> list[float]:
        """Wait for the parameters; the losses."""
        import jax

        jax.block_until_ready(self._trainer.params)
        return losses

    def close(self) -> None:
        """End the trainer."""
        self._trainer.close()


if __name__ == "__main__":
    launched = launch_arguments()
    serve(JaxmorphLoop, None if launched is None else launched.rank)
