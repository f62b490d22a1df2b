"""How a run begins, or what it goes on from: its directory and its last checkpoint, if they fit."""

import os
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from jaxmorph.checkpoints.folder import CheckpointFolder, PassedOver
from jaxmorph.checkpoints.manifest import Manifest
from jaxmorph.config import Config, load_config, placed_error
from jaxmorph.data.tokens import DataDigest
from jaxmorph.errors import UserError
from jaxmorph.records import EventKind
from jaxmorph.report import Reporter, RunDirectory, open_reporter, open_run_directory
from jaxmorph.report.run_directory import CONFIG, reopen_run_directory
from jaxmorph.training.model_factory import device_options
from jaxmorph.training.record import RunRecord

_LOCK = ".in_use"


@dataclass(frozen=True)
class Resumption:
    """A run that goes on.

    Attributes:
        config: The run's, with the overrides that it is resumed with.
        passed_over: Later ones that aren't whole, the newest first.
    """

    config: Config
    manifest: Manifest
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is that of the run's last step."""
        return self.manifest.step == self.config.run.steps


@dataclass(frozen=True)
class RunStart:
    """How a run begins.

    Attributes:
        first_step: The step it begins with: 0, or that after its last checkpoint.
        directory: Where it goes on; None: it gets a directory of its own.
        passed_over: Later checkpoints that it doesn't go on from, as they aren't whole.
    """

    config: Config
    first_step: int = 0
    directory: Path | None = None
    passed_over: tuple[PassedOver, ...] = ()

    @contextmanager
    def open_record(self, reporter: Reporter | None = None) -> Iterator[RunRecord]:
        """Open the run's directory and its records, for this process alone."""
        with ExitStack() as opened:
            known = (folder_apart(self.config), self.directory)  # nothing is changed there yet
            opened.enter_context(hold(path for path in known if path is not None))
            if self.directory is not None:
                self._require_last(self.directory)
            directory = opened.enter_context(self._open_directory())
            if self.directory is None:
                opened.enter_context(hold([directory.path]))
            prepare_checkpoints(self.config, directory.path)
            shown = reporter or open_reporter()
            record = RunRecord(self.config, directory, shown, first_step=self.first_step)
            opened.enter_context(closing(record))
            note_damaged(self.config, directory.path, self.passed_over, record, self.first_step)
            yield record

    def _open_directory(self) -> RunDirectory:
        if self.directory is None:
            return open_run_directory(self.config)
        return reopen_run_directory(self.directory, self.config, self.first_step)

    def _require_last(self, directory: Path) -> None:
        """Whether no checkpoint came since: until now another process may have been on."""
        known = {self.first_step, *(each.step for each in self.passed_over)}
        if max(checkpoint_folder(self.config, directory).steps(), default=0) != max(known):
            raise UserError(
                f"--resume: got {directory}, which has gone on meanwhile, expected one whose last "
                f"checkpoint is step_{self.first_step}"
            )


def checkpoint_folder(config: Config, directory: Path) -> CheckpointFolder:
    """Where a run has its checkpoints."""
    named = config.checkpoint.dir
    return CheckpointFolder(directory / "checkpoints" if named is None else Path(named))


def last_whole(
    config: Config, directory: Path, *, thorough: bool = True
) -> tuple[int | None, tuple[PassedOver, ...]]:
    """How many steps a run's last whole checkpoint has done.

    Returns:
        (the steps, None where there is no such checkpoint; the damaged ones that are newer).
    """
    return checkpoint_folder(config, directory).newest_whole(thorough=thorough)


def folder_apart(config: Config) -> Path | None:
    """The folder that `checkpoint.dir` names; None where there is none outside `run.dir`.

    Args:
        config: The run. Until it has its directory nothing may be made in there.
    """
    named, run = config.checkpoint.dir, Path(config.run.dir).absolute()
    folder = None if named is None else Path(named).absolute()
    return None if folder is None or folder.is_relative_to(run) else folder


def with_absolute_folder(config: Config) -> Config:
    """The run with a `checkpoint.dir` that is the same wherever the run is gone on with."""
    named = config.checkpoint.dir
    absolute = None if named is None else str(Path(named).absolute())
    checkpoint = config.checkpoint.model_copy(update={"dir": absolute})
    return config.model_copy(update={"checkpoint": checkpoint})


def prepare_checkpoints(config: Config, directory: Path) -> None:
    """Make the folder of a run's checkpoints, without what an earlier run left half-done there."""
    folder = checkpoint_folder(config, directory)
    if config.checkpoint.saves:
        _make(folder.path)
    folder.clean()


def try_named_folder(config: Config) -> None:
    """Make the folder that `checkpoint.dir` names, if one that is used, and write to it."""
    named = folder_apart(config)
    if named is None or not config.checkpoint.saves:
        return
    _make(named)
    try:
        with TemporaryFile(dir=named):
            pass
    except OSError as error:
        raise UserError(
            f"checkpoint.dir: {named}: cannot be written to: {error.strerror}"
        ) from error


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"checkpoint.dir: {folder}: cannot be made: {error.strerror}") from error


def require_no_checkpoints(config: Config) -> None:
    """Keep a new run from writing among, and removing, another run's checkpoints.

    Raises:
        UserError: If `checkpoint.dir` names a folder that has some.
    """
    folder = config.checkpoint.dir
    if folder is not None and CheckpointFolder(Path(folder)).steps():
        raise UserError(
            f"checkpoint.dir: got {folder}, which has another run's checkpoints, expected a folder "
            "without any; --resume RUN_DIR goes on with a run"
        )


def without_weights(config: Config) -> Config:
    """The run as it goes on: its parameters come from a checkpoint, whatever they started from."""
    return config.model_copy(update={"model": config.model.model_copy(update={"weights": None})})


def saved_config(directory: Path, overrides: Sequence[str] = (), where: str = "run") -> Config:
    """The configuration in a run's directory."""
    if not (directory / CONFIG).is_file():
        raise UserError(f"{where}: got {directory}, expected a run's directory, with a {CONFIG}")
    return load_config(directory / CONFIG, overrides)


def find_resumption(
    directory: Path, overrides: Sequence[str], *, thorough: bool = True
) -> Resumption:
    """Finds the last whole checkpoint of a run, and whether it can go on from there.

    Args:
        overrides: `section.key=value` each; for some keys only the value that they have.

    Raises:
        UserError: There is no such run, no whole checkpoint, or it is another model's; in one line.
    """
    config = with_absolute_folder(saved_config(directory, overrides, "--resume"))
    was = with_absolute_folder(saved_config(directory))
    folder = checkpoint_folder(was, directory)
    step, passed_over = folder.newest_whole(thorough=thorough)
    if step is None:
        raise _none_to_go_on_from(folder, passed_over)
    manifest = folder.manifest(step)
    try:
        _require_agreement(config, was, manifest, config.run.steps)
    except UserError as error:
        raise placed_error(directory / CONFIG, overrides, error) from error
    return Resumption(config, manifest, passed_over)


def start_of_script(config: Config, *, resume: bool) -> RunStart:
    """How the run of a script begins.

    Args:
        resume: Whether it goes on after the last whole checkpoint in `run.dir`; where there is
            none, it begins.

    Raises:
        UserError: It can't go on from that checkpoint, or `checkpoint.dir` has another run's.
    """
    config, directory = with_absolute_folder(config), Path(config.run.dir)
    if not resume or not (directory / CONFIG).is_file():
        require_no_checkpoints(config)
        try_named_folder(config)
        return RunStart(config)
    was = with_absolute_folder(saved_config(directory))
    folder = checkpoint_folder(was, directory)
    step, passed_over = folder.newest_whole()
    if step is not None:
        _require_agreement(config, was, folder.manifest(step), None)
    return RunStart(config, step or 0, directory, passed_over)


def _require_agreement(
    config: Config, was: Config, manifest: Manifest, num_steps: int | None
) -> None:
    for key, got, expected in _disagreements(config, was, manifest, num_steps):
        raise UserError(f"{key}: got {got}, expected {expected}")


def _none_to_go_on_from(folder: CheckpointFolder, passed_over: Sequence[PassedOver]) -> UserError:
    if not passed_over:
        return UserError(
            f"--resume: got no checkpoint in {folder.path}, expected one: a run makes them as its "
            "section 'checkpoint' says"
        )
    damages = "; ".join(f"{each.damage}" for each in passed_over)
    return UserError(f"--resume: got no whole checkpoint in {folder.path}, expected one: {damages}")


def set_aside(config: Config, directory: Path, passed_over: Sequence[PassedOver]) -> Iterator[str]:
    """Rename damaged checkpoints, so that nothing reads or counts them, and the next can be there.

    Yields:
        A line for each: what is wrong with it, and where it is now.
    """
    folder = checkpoint_folder(config, directory)
    for each in passed_over:
        yield f"passed over, and now {folder.set_aside(each.step)}: {each.damage}"


def note_damaged(
    config: Config,
    directory: Path,
    passed_over: Sequence[PassedOver],
    record: RunRecord,
    step: int,
) -> None:
    """Set damaged checkpoints aside, with an event for each."""
    for line in set_aside(config, directory, passed_over):
        record.write_event(step, EventKind.CHECKPOINT_DAMAGED, line)


def kept_cut(config: Config, manifest: Manifest) -> tuple[range, ...] | None:
    """The layers as the checkpoint has them, where they are not to be cut another way.

    What is measured may come out another time; so with `parallelism.layers: auto` the cut stays,
    for as long as there are as many stages.

    Returns:
        Each virtual stage's; None: cut them as the configuration says.
    """
    now, then = config.parallelism, manifest.config.parallelism
    as_many = (now.stages, now.chunks) == (then.stages, then.chunks)
    return manifest.layers if as_many and now.layers == "auto" else None


def check_vocabulary(manifest: Manifest, vocab_size: int) -> None:
    """Compare the model's vocabulary with that of the checkpoint."""
    if vocab_size != manifest.vocab_size:
        raise UserError(
            f"data.vocab_size: got {vocab_size:,}, expected {manifest.vocab_size:,}, that of the "
            "checkpoint's model"
        )


def check_data(manifest: Manifest, config: Config, data: DataDigest) -> None:
    """Compare the data with those that the checkpoint was trained on, if they are named the same.

    Args:
        config: The run's; with another path or tokenizer, other data are meant.
    """
    now, then = config.data, manifest.config.data
    names = [(section.path, section.tokenizer, section.token_dtype) for section in (now, then)]
    if manifest.data is not None and names[0] == names[1] and data != manifest.data:
        raise UserError(
            f"data.path: got {data.num_tokens:,} tokens, expected the {manifest.data.num_tokens:,} "
            "that the checkpoint was trained on: the data have changed since (to go on with these, "
            "give them another data.path)"
        )


def _disagreements(
    config: Config, was: Config, manifest: Manifest, num_steps: int | None
) -> Iterator[tuple[str, object, str]]:
    """Each key that keeps a run from going on: what was got, what was expected.

    Args:
        num_steps: How many steps the run has; None: as many as a script takes.
    """
    if config.run.dir != was.run.dir:
        yield "run.dir", config.run.dir, "none: a resumed run goes on in its own directory"
    folder, was_folder = config.checkpoint.dir, was.checkpoint.dir
    if (folder and Path(folder).resolve()) != (was_folder and Path(was_folder).resolve()):
        there = "none" if was_folder is None else was_folder
        yield "checkpoint.dir", folder, f"{there}: a run's checkpoints stay in one folder"
    if num_steps is not None and num_steps < manifest.step:
        done = f"at least the {manifest.step} steps that the last checkpoint has done"
        yield "run.steps", num_steps, done
    held_out, was_held_out = config.data.held_out_fraction, was.data.held_out_fraction
    if held_out != was_held_out:
        kept = f"{was_held_out:g}: what was held out, and what was learned, stay so"
        yield "data.held_out_fraction", f"{held_out:g}", kept
    yield from _other_model(config, manifest)


def _other_model(config: Config, manifest: Manifest) -> Iterator[tuple[str, object, str]]:
    left_out = {"weights", *device_options(manifest.config.model.factory)}
    now, then = _model_options(config, left_out), _model_options(manifest.config, left_out)
    for key in sorted(now.keys() | then.keys()):
        if now.get(key) != then.get(key):
            yield key, now.get(key), f"{then.get(key)}, that of the checkpoint's model"


def _model_options(config: Config, left_out: Container[str]) -> dict[str, object]:
    """Whatever decides which model it is, but for the data's vocabulary."""
    model = {
        f"model.{key}": value
        for key, value in config.model.model_dump().items()
        if key not in left_out
    }
    return {**model, "data.sequence_length": config.data.sequence_length}


@contextmanager
def hold(folders: Iterable[Path]) -> Iterator[None]:
    """Keep folders for this process while this lasts; a process that dies lets go of them.

    A file system that knows no locks keeps nobody off, and neither does a folder that isn't there
    or can't be written to, which whoever uses it will tell.

    Args:
        folders: Each gets a file, which stays.

    Raises:
        UserError: Another process has one of them.
    """
    with ExitStack() as held:
        for folder in {path.resolve() for path in folders}:
            held.enter_context(_hold(folder))
        yield


@contextmanager
def _hold(folder: Path) -> Iterator[None]:
    with ExitStack() as opened:
        with suppress(OSError):
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            opened.callback(os.close, descriptor)
            _lock(descriptor, folder)
        yield


def _lock(descriptor: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"{folder} is in use by another run, expected it to have ended") from error
