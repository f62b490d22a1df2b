"""`jaxmorph export`: a run's model in its own format."""

from pathlib import Path

from jaxmorph.stage.parameters import write_model
from jaxmorph.training.saved_model import load_saved_model


def export_model(run_dir: Path, step: int | None, to: Path | None) -> str:
    """Writes a checkpoint's parameters through the model's `write_weights`.

    Args:
        step: After how many steps; None: the last checkpoint.
        to: The folder to write to; None: `exported/step_N` in the run's directory.

    Returns:
        One line that says what was written.

    Raises:
        UserError: There is no such checkpoint, or its model writes no weights.
    """
    saved = load_saved_model(run_dir, step)
    folder = run_dir / "exported" / f"step_{saved.step}" if to is None else to
    write_model(saved.model, str(folder), saved.stages)
    num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    model = f"{saved.config.model.factory} {saved.config.model.preset}"
    return f"{model} after {saved.step} steps: {num_bytes:,} bytes in {folder}"
