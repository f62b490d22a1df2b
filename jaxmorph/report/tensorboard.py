"""Steps as events for TensorBoard, beside `metrics.jsonl`; written by tensorboardX."""

from pathlib import Path
from typing import Any

from jaxmorph.errors import UserError
from jaxmorph.records import StepRecord

FOLDER = "tensorboard"
_SCALARS = (
    "loss", "held_out_loss", "grad_norm", "step_s", "tokens_per_s", "bubble_rate",
    "predicted_step_s",
)  # fmt: skip
_FLUSH_S = 10


class TensorBoardEvents:
    """A run's steps as scalars, in a folder of their own; on disk within seconds.

    Args:
        run_directory: the run's; it gets a folder `tensorboard`.
        first_step: the first step that will be written. What the run wrote before a restart of
            it and of later ones is shown no more.

    Raises:
        UserError: tensorboardX is not installed.
    """

    def __init__(self, run_directory: Path, first_step: int = 0):
        self._folder = str(run_directory / FOLDER)
        self._writer: Any = self._open(first_step, purge_step=first_step)

    def _open(self, step: int, **options: Any) -> Any:
        suffix = f".from_step_{step}"
        return load_writer()(self._folder, flush_secs=_FLUSH_S, filename_suffix=suffix, **options)

    def write_step(self, record: StepRecord) -> None:
        """Adds a step; what was not measured of it is left out."""
        self._writer = self._writer or self._open(record.step)
        for name in _SCALARS:
            value = getattr(record, name)
            if value is not None:
                self._writer.add_scalar(name, value, record.step)

    def flush(self) -> None:
        """Has all that was added on disk; the next step begins a file of its own.

        tensorboardX's own `flush` doesn't wait for what its thread has yet to write.
        """
        self.close()

    def close(self) -> None:
        """Writes what is left, and closes the file; safe to call twice."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None


def load_writer() -> type[Any]:
    """The class that writes events.

    Raises:
        UserError: tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError as error:
        raise UserError(
            "metrics.tensorboard: got true, but tensorboardX is not installed, expected it: "
            "pip install -e '.[tensorboard]'"
        ) from error
    return SummaryWriter
