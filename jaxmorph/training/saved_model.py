"""A run's model as a checkpoint has it, on this process alone."""

from dataclasses import dataclass
from pathlib import Path

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.layout import stage_path
from jaxmorph.checkpoints.tree_files import TreeFiles
from jaxmorph.checkpoints.wholeness import damage_of
from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.runtime.stage_state import PARAMS
from jaxmorph.stage.model import Params, PipelineModel
from jaxmorph.training.model_factory import build_model, for_any_device
from jaxmorph.training.resume import checkpoint_folder, saved_config


@dataclass(frozen=True)
class SavedModel:
    """A model with its parameters.

    Attributes:
        config: The run's, as it was when it saved.
        model: The model, as it can be computed on any device.
        step: How many steps it was trained for.
        stages: Each virtual stage's layers and parameters, float32 numpy arrays, in the order of
            the pipeline: {"embed": (first stage), "layers": leaves stacked over the layers, "head":
            (last stage)}.
    """

    config: Config
    model: PipelineModel
    step: int
    stages: tuple[tuple[range, Params], ...]


def load_saved_model(run_dir: Path, step: int | None = None) -> SavedModel:
    """A run's model from one of its checkpoints.

    Args:
        step: After how many steps; None: the last checkpoint.

    Raises:
        UserError: There is no such run or checkpoint, or it isn't whole; in one line.
    """
    folder = checkpoint_folder(saved_config(run_dir), run_dir)
    manifest = folder.manifest(_chosen(folder, step))
    damage = damage_of(folder.finished(manifest.step), thorough=True)
    if damage is not None:
        raise UserError(f"{damage} (--step takes another checkpoint)")
    files = TreeFiles()
    checkpoint = folder.finished(manifest.step)
    return SavedModel(
        config=manifest.config,
        model=build_model(for_any_device(manifest.config), manifest.vocab_size),
        step=manifest.step,
        stages=tuple(
            (layers, files.read(stage_path(checkpoint, number), [PARAMS])[PARAMS])
            for number, layers in enumerate(manifest.layers)
        ),
    )


def _chosen(folder: CheckpointFolder, step: int | None) -> int:
    steps = folder.steps()
    if not steps:
        raise UserError(f"{folder.path}: got no checkpoint, expected one, as a finished run has")
    if step is None:
        return steps[-1]
    if step not in steps:
        there = ", ".join(map(str, steps))
        raise UserError(f"--step: got {step}, expected a checkpoint's in {folder.path}: {there}")
    return step
