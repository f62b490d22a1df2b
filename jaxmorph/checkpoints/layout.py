"""What is where in a folder of checkpoints, and in a checkpoint's."""

import re
import secrets
from pathlib import Path

MANIFEST = "manifest.json"
SEAL = "manifest.seal"
DRAFT = "manifest.draft"
_RANK_FILE = re.compile(r"\.rank_\d+_[0-9a-f]{16}")


def stage_path(checkpoint: Path, virtual_stage: int) -> Path:
    """Where a checkpoint has a virtual stage.

    Args:
        virtual_stage: Its number, in the order of the pipeline.
    """
    return checkpoint / f"virtual_stage_{virtual_stage}"


def list_path(checkpoint: Path, virtual_stage: int) -> Path:
    """Where the list of a virtual stage's files is, as for `stage_path`."""
    return checkpoint / f"virtual_stage_{virtual_stage}.files"


def new_rank_file(folder: Path, rank: int) -> Path:
    """Where a rank writes for the others to see; nobody else writes there."""
    return folder / f".rank_{rank}_{secrets.token_hex(8)}"


def is_rank_file(path: Path) -> bool:
    """Whether a path is one of `new_rank_file`'s."""
    return _RANK_FILE.fullmatch(path.name) is not None
