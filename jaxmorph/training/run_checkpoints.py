"""The checkpoints of one run, as one of its ranks uses them: where it begins and what it saves."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from jaxmorph.checkpoints.folder import stage_path
from jaxmorph.checkpoints.manifest import Manifest, TiedPaths
from jaxmorph.checkpoints.saver import CheckpointSaver
from jaxmorph.checkpoints.shared_folder import require_shared
from jaxmorph.checkpoints.tree_files import TreeFiles
from jaxmorph.config import Config
from jaxmorph.data.digest import DataDigest
from jaxmorph.planning.layer_choice import LayerChoice
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.stage_trainer import StageSettings, StageTrainer
from jaxmorph.training.resume import checkpoint_folder, without_weights


class RunCheckpoints:
    """What a rank of a run reads from checkpoints, and writes to them.

    Args:
        config: The run.
        directory: The run's.
        first_step: How many steps the checkpoint that it goes on from has done; 0: there is none.

    Attributes:
        starting_config: The run as this process takes it up.
        cut: The layers of the checkpoint; None where there is none.
    """

    def __init__(self, config: Config, directory: Path, first_step: int) -> None:
        self._folder = checkpoint_folder(config, directory)
        self._config = config
        self._first_step = first_step
        resumes = first_step > 0
        self.starting_config = without_weights(config) if resumes else config
        # As it was, whatever the configuration: a cut that is measured may come out another.
        self.cut = LayerChoice(self._folder.manifest(first_step).layers) if resumes else None
        # Made, and Orbax imported, now: later it would be in the middle of a step.
        self._files = TreeFiles() if resumes or config.checkpoint.every_steps != 0 else None

    @property
    def origin(self) -> str:
        """The checkpoint that the run goes on from, for people."""
        return f"from {self._folder.finished(self._first_step)}"

    def require_shared(self, rendezvous: Rendezvous) -> None:
        """Find out, if anything will be saved, whether all ranks can do so in one folder.

        Args:
            rendezvous: The meeting place of all ranks.

        Raises:
            UserError: If they can't; the same on all ranks.
        """
        if self._config.checkpoint.every_steps != 0:
            require_shared(self._folder.path, rendezvous)

    def restore(self, trainer: StageTrainer, own_stages: Sequence[int]) -> None:
        """Put the checkpoint's state, if there is one, in place of the initial one.

        Args:
            trainer: This rank's stage.
            own_stages: The numbers of its virtual stages.

        Raises:
            UserError: If it is another model's.
        """
        if self._first_step > 0 and self._files is not None:
            checkpoint = self._folder.finished(self._first_step)
            trainer.restore([self._files.read(stage_path(checkpoint, n)) for n in own_stages])

    def saver(
        self,
        rendezvous: Rendezvous,
        settings: StageSettings,
        tell: Callable[[int, str, str], None],
        told_so_far: Callable[[], Future[None]],
        *,
        vocab_size: int,
        tied: TiedPaths,
        data: DataDigest,
    ) -> CheckpointSaver:
        """What saves the run.

        Args:
            rendezvous: The meeting place of all ranks.
            settings: What the stage is built from.
            tell: Takes what rank 0 has to say: an event's step, kind and detail.
            told_so_far: Gives what is done once the records of all steps so far have been told.
            vocab_size: The data's.
            tied: The model's tied parameters.
            data: What the run is trained on.
        """
        return CheckpointSaver(
            self._folder,
            rendezvous,
            describe=partial(
                Manifest,
                layers=settings.layers,
                vocab_size=vocab_size,
                tied=tied,
                config=self._config,
                data=data,
            ),
            own_stages=settings.own_stages(rendezvous.rank),
            write=self._write,
            keep=self._config.checkpoint.keep,
            tell=tell,
            told_so_far=told_so_far,
        )

    def _write(self, path: Path, tree: Any) -> None:
        if self._files is None:
            raise ValueError(f"nothing should be saved, and yet {path} is")
        self._files.write(path, tree)
