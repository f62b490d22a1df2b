"""Writes steps for TensorBoard too, by tensorboardX."""

from pathlib import Path
from typing import Any

from jaxmorph.errors import UserError
from jaxmorph.records import StepRecord

FOLDER = "tensorboard"
_SCALARS = (
    "loss", "held_out_loss", "grad_norm", "step_s", "tokens_per_s", "bubble_rate",
    "predicted_step_s", "tflops_per_device", "mfu",
)  # fmt: skip
_FLUSH_S = 10


class TensorBoardEvents:
    """Writes scalars of steps into the run directory's folder `tensorboard`, within seconds.

    Args:
        first_step: The first step to write; TensorBoard then hides earlier records of this step
            and later ones.

    Raises:
        UserError: tensorboardX is not installed.
    """

    def __init__(self, run_directory: Path, first_step: int = 0):
        self._folder = str(run_directory / FOLDER)
        self._writer: Any = self._open(first_step, purge_step=first_step)

    def _open(self, step: int, **options: Any) -> Any:
        # An unlimited queue: a full one would block for ever once the writer's thread can't write.
        options |= {"max_queue": 0, "flush_secs": _FLUSH_S}
        return load_writer()(self._folder, filename_suffix=f".from_step_{step}", **options)

    def write_step(self, record: StepRecord) -> None:
        """Add a step's scalars, without those that are None."""
        self._writer = self._writer or self._open(record.step)
        scalars = {name: getattr(record, name) for name in _SCALARS}
        auxiliary = record.auxiliary or {}
        scalars |= {f"auxiliary/{name}": value for name, value in auxiliary.items()}
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Write everything and close the file; the next step begins a new one.

        Raises:
            OSError: It can't be written.
        """
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()  # its `flush` would not wait for its thread


def load_writer() -> type[Any]:
    """Import tensorboardX's writer.

    Raises:
        UserError: tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError as error:
        raise UserError(
            "metrics.tensorboard: got true without tensorboardX, expected it to be installed: "
            "pip install tensorboardX"
        ) from error
    return SummaryWriter
