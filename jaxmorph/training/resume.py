"""How a run begins or resumes: in which directory, from which checkpoint, with which keys."""

import fcntl
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from jaxmorph.checkpoints.folder import CheckpointFolder, DamagedCheckpoint, require_plain
from jaxmorph.checkpoints.manifest import Manifest
from jaxmorph.config import Config, check_config, load_config, locating_errors, override_config
from jaxmorph.data.tokens import DataDigest
from jaxmorph.errors import UserError
from jaxmorph.records import EventKind
from jaxmorph.report.run_directory import (
    CONFIG,
    RunDirectory,
    open_run_directory,
    reopen_run_directory,
)
from jaxmorph.report.terminal import Reporter, open_reporter
from jaxmorph.training.cluster import started_by_cluster
from jaxmorph.training.model_factory import changeable_options
from jaxmorph.training.record import RunRecord

_LOCK = ".in_use"


@dataclass(frozen=True)
class RunStart:
    """How a run begins.

    Attributes:
        first_step: 0, or the step after the checkpoint that it resumes from.
        directory: The directory of a run that resumes or begins there; None: a new one is made.
        passed_over: Damaged checkpoints that are newer, the newest first.
        damage: Which values of the directory's configuration are not used, and why.
    """

    config: Config
    first_step: int = 0
    directory: Path | None = None
    passed_over: tuple[DamagedCheckpoint, ...] = ()
    damage: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the run has done its last step."""
        return self.first_step == self.config.run.steps

    @contextmanager
    def open_record(self, reporter: Reporter | None = None) -> Iterator[RunRecord]:
        """Open the run's directory and its records, for this process alone."""
        with ExitStack() as opened:
            if self.directory is not None:
                _make(self.directory, "run.dir")
            known = (folder_apart(self.config), self.directory)
            opened.enter_context(hold(path for path in known if path is not None))
            if self.directory is not None:  # another process may have used it before
                self._require_last(self.directory)
            directory = opened.enter_context(self._open_directory())
            if self.directory is None:
                opened.enter_context(hold([directory.path]))
            prepare_checkpoints(self.config, directory.path)
            shown = reporter or open_reporter(plain=started_by_cluster())
            record = RunRecord(self.config, directory, shown, first_step=self.first_step)
            opened.enter_context(closing(record))
            set_aside(self.config, directory.path, self.passed_over, record, self.first_step)
            directory.damage = "; ".join(filter(None, (self.damage, directory.damage)))
            record.write_damage(self.first_step)
            yield record

    def _open_directory(self) -> RunDirectory:
        if self.directory is None:
            return open_run_directory(self.config)
        return reopen_run_directory(self.directory, self.config, self.first_step)

    def _require_last(self, directory: Path) -> None:
        known = {self.first_step, *(each.step for each in self.passed_over)}
        if max(checkpoint_folder(self.config, directory).steps(), default=0) != max(known):
            raise UserError(
                f"--resume: got {directory}, which another process has continued, expected one "
                f"whose last checkpoint is step_{self.first_step}"
            )


def checkpoint_folder(config: Config, directory: Path) -> CheckpointFolder:
    """The folder of a run's checkpoints."""
    named = config.checkpoint.dir
    return CheckpointFolder(directory / "checkpoints" if named is None else Path(named))


def folder_apart(config: Config) -> Path | None:
    """The folder that `checkpoint.dir` names, if it is outside of `run.dir`."""
    named, run = config.checkpoint.dir, Path(config.run.dir).absolute()
    folder = None if named is None else Path(named).absolute()
    return None if folder is None or folder.is_relative_to(run) else folder


def with_absolute_folder(config: Config) -> Config:
    """Make `checkpoint.dir` absolute, so that a run can resume from any working directory."""
    named = config.checkpoint.dir
    return _saving_to(None if named is None else str(Path(named).absolute()), config)


def _saving_to(folder: str | None, config: Config) -> Config:
    checkpoint = config.checkpoint.model_copy(update={"dir": folder})
    return config.model_copy(update={"checkpoint": checkpoint})


def prepare_checkpoints(config: Config, directory: Path) -> None:
    """Make the folder of a run's checkpoints, and remove unfinished ones from it."""
    folder = checkpoint_folder(config, directory)
    if config.checkpoint.saves:
        _make(folder.path)
    folder.clean()


def try_named_folder(config: Config, directory: Path | None = None) -> None:
    """Check that the checkpoint folder can be read and, outside of `run.dir`, written to.

    Args:
        directory: The run's directory; None: `run.dir`.
    """
    if not config.checkpoint.saves:
        return
    folder = checkpoint_folder(config, directory or Path(config.run.dir))
    require_plain(folder.path, "checkpoint.dir" if config.checkpoint.dir else "run.dir")
    named = folder_apart(config)
    if named is None:
        return
    _make(named)
    try:
        with TemporaryFile(dir=named):
            pass
    except OSError as error:
        raise UserError(
            f"checkpoint.dir: {named}: cannot be written to: {error.strerror}"
        ) from error


def _make(folder: Path, key: str = "checkpoint.dir") -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{key}: {folder}: cannot be made: {error.strerror}") from error


def require_no_checkpoints(config: Config) -> None:
    """Refuse a `checkpoint.dir` with another run's checkpoints: `keep` would remove them.

    Raises:
        UserError: The folder has some.
    """
    folder = config.checkpoint.dir
    if folder is not None and CheckpointFolder(Path(folder)).steps():
        raise UserError(
            f"checkpoint.dir: got {folder}, which has another run's checkpoints, expected a folder "
            "without any; --resume RUN_DIR continues a run"
        )


def without_weights(config: Config) -> Config:
    """The configuration of a run that resumes: its parameters come from the checkpoint."""
    return config.model_copy(update={"model": config.model.model_copy(update={"weights": None})})


@dataclass(frozen=True)
class SavedRun:
    """What is in a run's directory.

    Attributes:
        config: None if its file is damaged.
        damage: What is wrong with the file of its configuration; "" if nothing is.
    """

    config: Config | None
    folder: CheckpointFolder
    damage: str = ""


def saved_run(directory: Path, where: str = "run") -> SavedRun:
    """The configuration and the checkpoints in a run's directory.

    If one is damaged, the other is still found, if the checkpoints are in the usual place.

    Raises:
        UserError: It is no run's directory, or has neither.
    """
    own = CheckpointFolder(directory / "checkpoints")
    try:
        if not (directory / CONFIG).is_file():
            raise UserError(
                f"{where}: got {directory}, expected a run's directory, with a {CONFIG}"
            )
        config = with_absolute_folder(load_config(directory / CONFIG))
    except UserError as error:
        if not own.steps():
            raise
        return SavedRun(None, own, f"{error}; that of the checkpoint is used")
    named = checkpoint_folder(config, directory)
    if named.steps() or not own.steps():
        return SavedRun(config, named)
    no_longer = f"{CONFIG}: checkpoint.dir: got {named.path}, which has no checkpoint"
    return SavedRun(config, own, f"{no_longer}; those of {own.path} are used")


def find_resumption(
    directory: Path, overrides: Sequence[str], *, thorough: bool = True
) -> tuple[RunStart, Manifest]:
    """How a run with overrides resumes from its last whole checkpoint.

    Returns:
        How it resumes, and the checkpoint's manifest.

    Raises:
        UserError: There is no such run, no whole checkpoint, or an override would change the model.
    """
    run = saved_run(directory, "--resume")
    manifest, passed_over = _newest(run, thorough=thorough)
    if manifest is None:
        raise no_checkpoint(run.folder, ())
    require_known_model(manifest, directory)
    was, damage = _trusted_config(run, manifest)
    config = with_absolute_folder(override_config(was, overrides, directory / CONFIG))
    with locating_errors(directory / CONFIG, overrides):
        _require_agreement(config, was, manifest, config.run.steps)
    return RunStart(config, manifest.step, directory, passed_over, damage), manifest


def find_resumption_here(
    config: Config, path: Path, overrides: Sequence[str], *, thorough: bool = True
) -> tuple[RunStart, Manifest] | None:
    """As `find_resumption`, in a configuration's `run.dir`; None: it has no checkpoint.

    Args:
        path: The configuration's file, which errors name.

    Raises:
        UserError: All checkpoints are damaged, or the configuration has another model.
    """
    directory = Path(config.run.dir)
    try:
        run = saved_run(directory)
    except UserError:  # it has neither a configuration nor a checkpoint
        return None
    manifest, passed_over = _newest(run, thorough=thorough)
    if manifest is None:
        return None
    require_known_model(manifest, directory)
    with locating_errors(path, overrides):
        return _resumed(config, run, manifest, passed_over, config.run.steps), manifest


def start_of_script(config: Config, *, resume: bool) -> RunStart:
    """How a script's run begins.

    Args:
        resume: Resume from the last checkpoint in `run.dir`, if there is one. Here only the lengths
            of its parts' files are checked; `verification` reads them later.

    Raises:
        UserError: The checkpoint is of another model, `checkpoint.dir` has checkpoints of another
            run, or all checkpoints are damaged.
    """
    config, directory = with_absolute_folder(config), Path(config.run.dir)
    if not resume or not (directory / CONFIG).is_file():
        require_no_checkpoints(config)
        try_named_folder(config)
        return RunStart(config)
    run = saved_run(directory)
    manifest, passed_over = _newest(run, thorough=False)
    if manifest is None:
        return RunStart(config, 0, directory, damage=run.damage)
    return _resumed(config, run, manifest, passed_over, None)


def _newest(
    run: SavedRun, *, thorough: bool
) -> tuple[Manifest | None, tuple[DamagedCheckpoint, ...]]:
    """The manifest of the last whole checkpoint, and the damaged ones that are newer."""
    step, passed_over = run.folder.newest_whole(thorough=thorough)
    if step is None and passed_over:  # a new start would lose what they still hold
        raise no_checkpoint(run.folder, passed_over)
    return None if step is None else run.folder.manifest(step), passed_over


def _resumed(
    config: Config,
    run: SavedRun,
    manifest: Manifest,
    passed_over: tuple[DamagedCheckpoint, ...],
    num_steps: int | None,
) -> RunStart:
    """How a run resumes in a configuration's `run.dir`.

    Args:
        num_steps: The number of the run's steps; None for a script.
    """
    was, damage = _trusted_config(run, manifest, is_script=num_steps is None)
    # The name by which the directory was reached doesn't matter.
    was = was.model_copy(update={"run": was.run.model_copy(update={"dir": config.run.dir})})
    _require_agreement(config, was, manifest, num_steps)
    return RunStart(config, manifest.step, Path(config.run.dir), passed_over, damage)


def _trusted_config(
    run: SavedRun, manifest: Manifest, *, is_script: bool = False
) -> tuple[Config, str]:
    """The run's configuration as far as it fits the checkpoint; why the rest of it is not used.

    Damage to the file can change a value into another valid one. A value that does not fit the
    checkpoint is replaced; the event `resumed` lists other changes (`run_checkpoints`).
    """
    # If it is damaged, `saved_run` has found the checkpoints in the usual place.
    folder = None if run.damage or run.config is None else run.config.checkpoint.dir
    of_checkpoint = _saving_to(folder, manifest.config)
    if run.config is None:
        return of_checkpoint, run.damage
    config, saved = run.config, of_checkpoint.model_dump(mode="json")
    tree, notes = _saving_to(folder, config).model_dump(mode="json"), [run.damage]
    num_steps = None if is_script else config.run.steps
    for key, got, _ in _disagreements(config, config, manifest, num_steps):
        section, _, name = key.partition(".")
        tree[section].pop(name, None)
        tree[section] |= {name: saved[section][name]} if name in saved[section] else {}
        used = saved[section].get(name, "none")
        notes.append(f"{CONFIG}: {key}: got {got}; that of the checkpoint is used, {used}")
    try:
        return check_config(tree, CONFIG), "; ".join(filter(None, notes))
    except UserError as error:
        return of_checkpoint, f"{error}; the configuration of the checkpoint is used"


def _require_agreement(
    config: Config, was: Config, manifest: Manifest, num_steps: int | None
) -> None:
    for key, got, expected in _disagreements(config, was, manifest, num_steps):
        raise UserError(f"{key}: got {got}, expected {expected}")


def no_checkpoint(folder: CheckpointFolder, passed_over: Sequence[DamagedCheckpoint]) -> UserError:
    """The error for a folder without a whole checkpoint to resume from."""
    if not passed_over:
        return UserError(
            f"--resume: got no checkpoint in {folder.path}, expected one: the run's section "
            "'checkpoint' says when it saves"
        )
    damages = "; ".join(f"{each.damage}" for each in passed_over)
    return UserError(f"--resume: got no whole checkpoint in {folder.path}, expected one: {damages}")


def set_aside(
    config: Config,
    directory: Path,
    passed_over: Sequence[DamagedCheckpoint],
    record: RunRecord,
    step: int,
) -> None:
    """Rename damaged checkpoints, so that the run can save at their steps, and report each."""
    folder = checkpoint_folder(config, directory)
    for each in passed_over:
        detail = f"passed over, and now {folder.set_aside(each.step)}: {each.damage}"
        record.write_event(step, EventKind.CHECKPOINT_DAMAGED, detail)


def kept_cut(config: Config, manifest: Manifest) -> tuple[range, ...] | None:
    """The checkpoint's cut, if the run keeps it; None: cut as the configuration says.

    With `parallelism.layers: auto` and the same stages the cut stays: a new measurement could
    choose another one by chance.
    """
    now, then = config.parallelism, manifest.config.parallelism
    as_many = (now.stages, now.chunks) == (then.stages, then.chunks)
    return manifest.layers if as_many and now.layers == "auto" else None


def require_known_model(manifest: Manifest, directory: Path) -> None:
    """Refuse a script's run where the configuration must name the model."""
    if manifest.is_of_script:
        raise UserError(
            f"{directory}: got a script's run, whose model only the script knows, expected a run "
            "of `jaxmorph train`"
        )


def check_vocabulary(manifest: Manifest, vocab_size: int) -> None:
    """Require the vocabulary of the checkpoint's model."""
    if vocab_size != manifest.vocab_size:
        raise UserError(
            f"data.vocab_size: got {vocab_size:,}, expected {manifest.vocab_size:,}, that of the "
            "checkpoint's model"
        )


def check_data(manifest: Manifest, config: Config, data: DataDigest) -> None:
    """Require the data that the checkpoint was trained on, unless `config` names other data."""
    now, then = config.data, manifest.config.data
    names = [
        (section.factory, section.path, section.tokenizer, section.token_dtype)
        for section in (now, then)
    ]
    if manifest.data is None or names[0] != names[1] or data == manifest.data:
        return
    if config.data.factory is not None:
        raise UserError(
            f"data.factory: {config.data.factory}: got other data, or another module, than the "
            "checkpoint was trained on (to continue with these, keep an attribute `digest` of what "
            "build_data returns, or give them another data.path)"
        )
    raise UserError(
        f"data.path: got {data.num_tokens:,} tokens, expected the {manifest.data.num_tokens:,} "
        "that the checkpoint was trained on: the data have changed (to continue with these, "
        "give them another data.path)"
    )


def _disagreements(
    config: Config, was: Config, manifest: Manifest, num_steps: int | None
) -> Iterator[tuple[str, object, str]]:
    """The keys that keep a run from resuming: key, what was got, what was expected."""
    if config.run.dir != was.run.dir:
        yield "run.dir", config.run.dir, "none: a resumed run continues in its own directory"
    folder, was_folder = config.checkpoint.dir, was.checkpoint.dir
    if (folder and Path(folder).resolve()) != (was_folder and Path(was_folder).resolve()):
        there = "none" if was_folder is None else was_folder
        yield "checkpoint.dir", folder, f"{there}: a run's checkpoints stay in one folder"
    if num_steps is not None and num_steps < manifest.step:
        done = f"at least the {manifest.step} steps that the last checkpoint has done"
        yield "run.steps", num_steps, done
    held_out = config.data.held_out_fraction
    was_held_out = manifest.config.data.held_out_fraction
    if held_out != was_held_out:
        kept = f"{was_held_out:g}: held-out text must stay held out"
        yield "data.held_out_fraction", f"{held_out:g}", kept
    yield from _other_model(config, manifest)


def _other_model(config: Config, manifest: Manifest) -> Iterator[tuple[str, object, str]]:
    # The module's folder doesn't decide which model it is, and may have changed.
    moved = manifest.config.model.model_copy(update={"folder": config.model.folder})
    left_out = {"folder", "weights", *changeable_options(moved)}
    now, then = _model_options(config, left_out), _model_options(manifest.config, left_out)
    for key in sorted(now.keys() | then.keys()):
        if now.get(key) != then.get(key):
            own = f"{then[key]}, that of" if key in then else "no value: it is not set in"
            yield key, now.get(key, "none"), f"{own} the checkpoint's model"


def _model_options(config: Config, left_out: Container[str]) -> dict[str, object]:
    """The options that make the model what it is; `check_vocabulary` checks its vocabulary."""
    model = {
        f"model.{key}": value
        for key, value in config.model.model_dump().items()
        if key not in left_out
    }
    return {**model, "data.sequence_length": config.data.sequence_length}


@contextmanager
def hold(folders: Iterable[Path]) -> Iterator[None]:
    """Lock folders for this process, by a file in each; a process that dies releases its locks.

    A folder that is missing, can't be written to, or has a file system without locks stays
    unlocked; the next write to it reports the first two cases.

    Raises:
        UserError: Another process holds one of them.
    """
    with ExitStack() as held:
        for folder in {path.resolve() for path in folders}:
            with suppress(OSError):
                descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
                held.callback(os.close, descriptor)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    expected = "expected one that has ended"
                    raise UserError(f"{folder}: in use by another run, {expected}") from error
        yield
