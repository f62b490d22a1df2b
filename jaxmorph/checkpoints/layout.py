"""What is where in a checkpoint's folder."""

from pathlib import Path

MANIFEST = "manifest.json"
SEAL = "manifest.seal"


def stage_path(checkpoint: Path, virtual_stage: int) -> Path:
    """Where a checkpoint has a virtual stage.

    Args:
        checkpoint: The checkpoint's folder.
        virtual_stage: Its number, in the order of the pipeline.
    """
    return checkpoint / f"virtual_stage_{virtual_stage}"


def list_path(checkpoint: Path, virtual_stage: int) -> Path:
    """Where the list of a virtual stage's files is, as for `stage_path`."""
    return checkpoint / f"virtual_stage_{virtual_stage}.files"
