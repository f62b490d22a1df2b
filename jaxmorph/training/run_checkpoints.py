"""A rank's view of its run's checkpoints: the one it resumes from, and those it saves."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.manifest import Manifest, TiedPaths
from jaxmorph.checkpoints.recut import read_part
from jaxmorph.checkpoints.saver import CheckpointSaver, require_shared
from jaxmorph.checkpoints.tree_files import TreeFiles
from jaxmorph.config import Config
from jaxmorph.data.tokens import DataDigest
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.replicas import Replicas
from jaxmorph.runtime.shares import Shares
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.training.layer_choice import LayerChoice
from jaxmorph.training.resume import checkpoint_folder, kept_cut, without_weights
from jaxmorph.training.step_recorder import StepRecorder

_LONGEST_VALUE = 60  # characters, in an event


@dataclass(frozen=True)
class TrainedOn:
    """What a checkpoint records about the data.

    Attributes:
        vocab_size: 0 for a script's run, or for a user's own data that name no vocabulary
            (`Manifest.is_of_script` distinguishes them).
    """

    vocab_size: int = 0
    data: DataDigest | None = None


class RunCheckpoints:
    """Restores and saves one rank's state.

    Attributes:
        first_step: The steps that the checkpoint has done; 0: the run is new.
        starting_config: The configuration, without initial weights if the run resumes.
    """

    def __init__(self, config: Config, directory: Path, first_step: int) -> None:
        self.directory, self.first_step = directory, first_step
        self._folder = checkpoint_folder(config, directory)
        self._config = config
        resumes = first_step > 0
        self._manifest = self._folder.manifest(first_step) if resumes else None
        self.starting_config = without_weights(config) if resumes else config
        # Now, since the import of Orbax would slow a step down later.
        self._files = TreeFiles() if resumes or config.checkpoint.saves else None

    @property
    def is_in_a_v(self) -> bool | None:
        """Whether the checkpoint's stages are in a V; None without one of as many stages."""
        then = self._manifest and self._manifest.config
        if then is None or then.parallelism.stages != self._config.parallelism.stages:
            return None
        return then.placement.kind == "v"

    def place(self, *, in_a_v: bool) -> None:
        """Save with what `schedule.placement: auto` became, if that was configured."""
        if self._config.schedule.placement == "auto":
            self._config = self._config.placed(in_a_v=in_a_v)

    @property
    def cut(self) -> LayerChoice | None:
        """The checkpoint's cut of the layers; None if the configuration decides."""
        kept = kept_cut(self._config, self._manifest) if self._manifest else None
        return LayerChoice(kept) if kept else None

    def origin(self, layers: Sequence[range], trained_on: TrainedOn) -> str:
        """The checkpoint that the run resumes from, and what has changed since, in words."""
        if self._manifest is None:
            return "from the beginning"
        changes = _changes(self._manifest, self._config, trained_on.data)
        return "; ".join([*_described(self._folder, self._manifest, layers), *changes])

    def require_shared(self, rendezvous: Rendezvous) -> None:
        """Require that all ranks see one checkpoint folder, if the run saves.

        Raises:
            UserError: They don't; raised on all ranks.
        """
        if self._config.checkpoint.saves:
            require_shared(self._folder.path, rendezvous)

    def restore(self, trainer: StageTrainer, own_layers: Sequence[range]) -> None:
        """Restore the checkpoint's state, if the run resumes."""
        if self._manifest is not None and self._files is not None:
            checkpoint = self._folder.finished(self._manifest.step)
            saved, shares = self._manifest.layers, self._manifest.config.num_optimizer_shares
            read = partial(read_part, self._files, checkpoint, saved, num_replicas=shares)
            if trainer.shares is not None and self._is_divided_alike(trainer.shares, own_layers):
                own_share = trainer.shares.own.index
                trainer.restore([read(own, share=own_share) for own in own_layers])
            else:
                trainer.restore(trainer.own_shares([read(own) for own in own_layers]))

    def _is_divided_alike(self, shares: Shares, own_layers: Sequence[range]) -> bool:
        """Whether the checkpoint has each share of the rank's stages as a separate part."""
        if self._manifest is None:
            return False
        then, now = self._manifest.config, self._config
        # What the tensor axis splits is not divided among replicas.
        return (
            then.num_optimizer_shares == shares.own.count
            and then.parallelism.tensor == now.parallelism.tensor
            and set(own_layers) <= set(self._manifest.layers)
        )

    def saver(
        self,
        replicas: Replicas,
        settings: StageSettings,
        tied: TiedPaths,
        trained_on: TrainedOn,
        recorder: StepRecorder,
    ) -> CheckpointSaver:
        """The saver, whose events go to the recorder."""
        # Replicas differ only in what they divide. Those that write nothing wait for the save too.
        writes = replicas.own.index == 0 or self._config.num_optimizer_shares > 1
        describe = partial(
            Manifest,
            layers=settings.layers,
            vocab_size=trained_on.vocab_size,
            tied=tied,
            config=self._config,
            data=trained_on.data,
        )
        return CheckpointSaver(
            self._folder,
            replicas.all_ranks,
            describe=lambda step: describe(step, **recorder.checkpoint_fields()),
            own_stages=settings.own_stages(replicas.pipeline.rank) if writes else (),
            write=self._write,
            keep=self._config.checkpoint.keep,
            emit=recorder.emit,
            on_disk=recorder.on_disk,
            within_s=self._config.timeouts.save_s,
            replica=replicas.own.index,
        )

    def _write(self, path: Path, tree: Any) -> None:
        if self._files is None:
            raise ValueError(f"{path}: the run saves no checkpoints")
        self._files.write(path, tree)


def _described(
    folder: CheckpointFolder, manifest: Manifest, layers: Sequence[range]
) -> Iterator[str]:
    yield f"from {folder.finished(manifest.step)}, the last that is whole by its checksums"
    if tuple(layers) != manifest.layers:
        before, now = (" ".join(str(len(own)) for own in cut) for cut in (manifest.layers, layers))
        yield f"layers {before} are cut {now}"
    if manifest.made_under:
        yield f"it was made under {manifest.made_under}"
    yield from (f"{link} was {state}" for link, state in manifest.link_states.items())


def _changes(manifest: Manifest, config: Config, data: DataDigest | None) -> Iterator[str]:
    """What differs from the run that saved the checkpoint, and may change its results."""
    then, now = (dict(_keys(each.model_dump(mode="json"))) for each in (manifest.config, config))
    changed = [
        f"{key} {_shown(now.get(key))} (was {_shown(then.get(key))})"
        for key in then | now
        if now.get(key) != then.get(key)
    ]
    if changed:
        yield f"changed: {', '.join(changed)}"
    if data is not None and manifest.data is not None and data != manifest.data:
        own = config.data.factory is not None
        yield (
            "other data"
            if own
            else f"other data: {data.num_tokens:,} tokens (was {manifest.data.num_tokens:,})"
        )


def _keys(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{above}{name}.")
        else:
            yield above + name, value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
