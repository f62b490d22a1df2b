"""A run directory: configuration, metrics, events, traces (`docs/reference/run-files.md`)."""

import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Self, TypeVar

from jaxmorph.config import Config, dump_config
from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.messages import LinksChanged
from jaxmorph.plain_json import (
    Json,
    ParseError,
    as_object,
    parse_line,
    with_sum,
    without_sum,
)
from jaxmorph.records import Event, EventKind, StepRecord
from jaxmorph.report.tensorboard import TensorBoardEvents, load_writer
from jaxmorph.transport.secret import SECRET_FILE

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
PROFILE = "profile.json"
RECOVERY = "recovery.json"
_LINKS = "links{}.json"
LAYERS = "layers.json"
_CONTROL = "control{}"
_MOST_CONTROL_BYTES = 32 << 20
_TRACES = "trace"
_TRACE = re.compile(r"step_(\d+)\.json")
_STAY = frozenset({
    EventKind.RESUMED, EventKind.CHECKPOINT_DAMAGED, EventKind.RANK_FAILED, EventKind.RESTARTED,
    EventKind.LINK_FAILED, EventKind.CHECKPOINT_FAILED, EventKind.FILES_DAMAGED,
    EventKind.STALLED,
})  # fmt: skip
"""Events about failures and restarts stay when their steps are done again."""
_Line = TypeVar("_Line", StepRecord, Event)


def links_file(directory: Path, replica: int) -> Path:
    """Where a replica's degraded links are: `links.json`, `links_r1.json` and so on."""
    return directory / _LINKS.format(f"_r{replica}" if replica else "")


def control_folder(directory: Path, replica: int) -> Path:
    """Where a replica's observations are: `control`, `control_r1` and so on."""
    return directory / _CONTROL.format(f"_r{replica}" if replica else "")


@dataclass(frozen=True)
class RecoveryFile:
    """The fields of `recovery.json` that are read; each recovery is a `Recovery.to_json`."""

    goodput: float | None = None
    recoveries: tuple[Json, ...] = ()


class RunLines:
    """Appends to `metrics.jsonl` and `events.jsonl`, each line whole.

    Two processes append: rank 0 writes its measurements before it sends them, and the process that
    started the ranks writes what it observes. A line that can't be written, as on a full disk,
    raises OSError, and is written with the next one.

    Args:
        path: A run's directory.
    """

    def __init__(self, path: Path) -> None:
        self._metrics, self._events = _Appender(path / METRICS), _Appender(path / EVENTS)

    def write_step(self, record: StepRecord) -> None:
        """Append a step to `metrics.jsonl`; numbers that are not finite become null."""
        self._metrics.write(_json_line(record.metrics()))

    def write_event(self, event: Event) -> None:
        """Append an event to `events.jsonl`."""
        self._events.write(_json_line(event.line()))

    def sync(self) -> None:
        """Sync all lines so far to disk.

        Raises:
            OSError: They can't be written; the error names the file.
        """
        for each in (self._metrics, self._events):
            each.sync()

    def close(self) -> None:
        """Close the files; safe to call twice."""
        for each in (self._metrics, self._events):
            each.close()


class ObservationFiles:
    """Appends what a replica's controller has observed to the newest file of its folder.

    Args:
        folder: A `control_folder`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: Path | None = None

    def write(self, record: bytes, *, begins: bool) -> None:
        """Append a record, or begin a new file with it.

        The oldest files are removed while all together exceed 32 MiB. After a record that can't be
        written, others are dropped until one begins a new file.
        """
        path, self._file = self._file, None
        if begins:
            path = self._next_file()
        if path is not None:
            with path.open("xb" if begins else "ab") as file:
                file.write(record)
            self._file = path

    def _next_file(self) -> Path:
        self.folder.mkdir(exist_ok=True)
        files = sorted(self.folder.glob("*.jsonl"))
        while len(files) > 1 and sum(file.stat().st_size for file in files) > _MOST_CONTROL_BYTES:
            files.pop(0).unlink()
        numbers = (int(file.stem) for file in files if file.stem.isdecimal())
        return self.folder / f"{max(numbers, default=0) + 1:06d}.jsonl"


class _Appender:
    """Appends to one file; any thread may call it."""

    def __init__(self, path: Path) -> None:
        self._path, self._pending = path, b""
        self._lock = threading.Lock()
        self._fd: int | None = self._open()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, line: str) -> None:
        with self._lock, self._naming_the_file():
            self._pending += line.encode()
            if self._fd is not None and os.fstat(self._fd).st_nlink == 0:  # the file was removed
                again = self._open()
                os.dup2(again, self._fd, inheritable=False)
                os.close(again)
            while self._pending and self._fd is not None:
                self._pending = self._pending[os.write(self._fd, self._pending) :]

    def sync(self) -> None:
        self.write("")
        with self._naming_the_file():
            if self._fd is not None:
                os.fsync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = str(self._path)
            raise


class RunDirectory:
    """An open run directory.

    Args:
        path: An existing directory that belongs to this run alone.
        tensorboard: Gets the steps too; closed with the directory.
        damage: What was wrong with its files, in words; "" if nothing was.
    """

    def __init__(
        self, path: Path, *, tensorboard: TensorBoardEvents | None = None, damage: str = ""
    ):
        self.path, self.damage = path, damage
        self._lines = RunLines(path)
        self._tensorboard = tensorboard

    def write_step(self, record: StepRecord) -> None:
        """Write a step, which no rank has written, and show it."""
        self._lines.write_step(record)
        self.show_step(record)

    def write_event(self, event: Event) -> None:
        """Write an event, which no rank has written."""
        self._lines.write_event(event)

    def show_step(self, record: StepRecord) -> None:
        """Pass a step to TensorBoard."""
        if self._tensorboard is not None:
            self._tensorboard.write_step(record)

    def show_event(self, event: Event) -> None:
        """Write TensorBoard's records to disk when a checkpoint is saved."""
        if self._tensorboard is not None and event.kind == EventKind.CHECKPOINT_SAVED:
            self._tensorboard.close()  # a run that resumes from here never writes these steps again

    def write_config(self, config: Config) -> None:
        """Replace `config.yaml`."""
        replace_file(self.path / CONFIG, dump_config(config))

    def write_profile(self, profile: Mapping[str, Any]) -> None:
        """Replace `profile.json`, the measured costs of ops and links."""
        replace_file(self.path / PROFILE, _json_line(profile))

    def write_links(self, changed: LinksChanged) -> None:
        """Replace a replica's degraded links."""
        replace_file(links_file(self.path, changed.replica), _json_line(as_object(changed)))

    def write_recovery(self, values: Mapping[str, Any]) -> None:
        """Replace `recovery.json`, the goodput and the cost of failures."""
        text = json.dumps(json.loads(_json_line(values)), indent=1)
        replace_file(self.path / RECOVERY, text + "\n")

    def go_back(self, step: int) -> None:
        """Remove the lines of `step` and later steps, as `reopen_run_directory` does.

        Raises:
            RunFailedError: A file can't be written.
        """
        try:
            self.close()
            self.damage = _go_back(self.path, step)
            self._lines = RunLines(self.path)
            if self._tensorboard is not None:
                self._tensorboard = TensorBoardEvents(self.path, step)
        except OSError as error:
            where = error.filename or self.path
            raise RunFailedError(f"{where}: cannot be written: {error.strerror}") from error

    def trace_path(self, step: int) -> Path:
        """The path for a step's Chrome trace, `trace/step_N.json`; makes the folder."""
        directory = self.path / _TRACES
        directory.mkdir(exist_ok=True)
        return directory / f"step_{step}.json"

    def traces(self) -> dict[int, Path]:
        """The Chrome traces by step, in rising order."""
        return find_traces(self.path)

    def close(self) -> None:
        """Close the files; safe to call twice."""
        self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_records(path: Path, kind: type[_Line]) -> list[_Line]:
    """The lines of a run's metrics or events, without an unfinished last one.

    Raises:
        UserError: A line is not what a run writes.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    whole = enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1)
    try:
        return [parse_line(kind, line, f"{path}, line {number}") for number, line in whole]
    except ParseError as error:
        raise UserError(str(error)) from error


def find_traces(path: Path) -> dict[int, Path]:
    """A run directory's Chrome traces by step, in rising order."""
    found = ((_TRACE.fullmatch(trace.name), trace) for trace in (path / _TRACES).glob("*"))
    return dict(sorted((int(match[1]), trace) for match, trace in found if match))


def open_run_directory(config: Config) -> RunDirectory:
    """Make a run's own directory (`claim_run_directory`), and open it.

    Raises:
        UserError: The directory can't be made, or tensorboardX is missing.
    """
    if config.metrics.tensorboard:
        load_writer()  # before anything is written
    path = claim_run_directory(config)
    try:
        return RunDirectory(path, tensorboard=_tensorboard(config, path))
    except OSError as error:
        raise _cannot_write(config, error) from error


def reopen_run_directory(path: Path, config: Config, step: int) -> RunDirectory:
    """Open the directory of a run that resumes after `step` steps, with a new configuration.

    The lines of later steps are removed, since these steps will be done again, except for events
    about failures and restarts. What can't be read is removed too; `RunDirectory.damage` says what.

    Raises:
        UserError: A file can't be written, or tensorboardX is missing.
    """
    if config.metrics.tensorboard:
        load_writer()  # before anything is written
    try:
        damage = _go_back(path, step)
        replace_file(path / CONFIG, dump_config(config))
        return RunDirectory(path, tensorboard=_tensorboard(config, path, step), damage=damage)
    except OSError as error:
        raise UserError(f"--resume: {path}: cannot write: {error.strerror}") from error


def _tensorboard(config: Config, path: Path, first_step: int = 0) -> TensorBoardEvents | None:
    return TensorBoardEvents(path, first_step) if config.metrics.tensorboard else None


def _go_back(path: Path, step: int) -> str:
    """Remove the lines of `step` and later, and what is damaged; says what that was."""
    return "; ".join(_damages(path, step))


def _damages(path: Path, step: int) -> Iterator[str]:
    steps: set[int] = set()

    def is_wanted(record: StepRecord) -> bool:
        steps.add(record.step)
        return record.step < step

    def stays(event: Event) -> bool:
        return event.step < step or event.kind in _STAY

    yield from _keep_lines(path / METRICS, StepRecord, is_wanted)
    if missing := [each for each in range(step) if each not in steps]:
        yield f"{METRICS} lacks {len(missing):,} of {step:,} steps, the first is {missing[0]}"
    yield from _keep_lines(path / EVENTS, Event, stays)
    links = sorted(path.glob(_LINKS.format("*")))
    for file in (path / PROFILE, path / RECOVERY, *links, path / LAYERS):
        yield from _remove_damaged(file)


def _keep_lines(path: Path, kind: type[_Line], wanted: Callable[[_Line], bool]) -> Iterator[str]:
    """Keep the lines that are wanted and whole; says how many are damaged."""
    if not path.is_file():
        return
    kept, num_damaged = [], 0
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            try:
                if wanted(parse_line(kind, line, path.name)):
                    kept.append(line.removesuffix("\n") + "\n")
            except ParseError:
                num_damaged += 1
    replace_file(path, "".join(kept))
    if num_damaged:
        lines = "line" if num_damaged == 1 else "lines"
        yield f"{path.name}: {num_damaged:,} damaged {lines} left out"


def _remove_damaged(path: Path) -> Iterator[str]:
    """Remove a file of one JSON object if it is damaged; no run needs it to continue."""
    if not path.is_file():
        return
    try:
        without_sum(json.loads(path.read_text(encoding="utf-8")), path.name)
    except ValueError:
        path.unlink()
        yield f"{path.name} is damaged, and removed"


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically: no reader sees half of it, and an error keeps the old one."""
    written = path.with_name(f"{path.name}.new")
    try:
        written.write_text(text, encoding="utf-8")
        written.replace(path)
    except OSError as error:
        with suppress(OSError):
            written.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def claim_run_directory(config: Config) -> Path:
    """Make a directory for one run alone, and write its configuration there.

    It is the first of `runs/demo`, `runs/demo-2`, `runs/demo-3`, ... that is absent or empty.

    Raises:
        UserError: The directory can't be made.
    """
    text, wanted = dump_config(config), Path(config.run.dir)
    if not wanted.name:
        raise UserError(f"run.dir: got {config.run.dir!r}, expected a folder with a name")
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))
    try:
        return next(path for path in chain([wanted], numbered) if _claim(path, text))
    except OSError as error:
        raise _cannot_write(config, error) from error


def _cannot_write(config: Config, error: OSError) -> UserError:
    wanted = Path(config.run.dir)
    at = error.filename or wanted
    return UserError(f"run.dir: {wanted}: cannot write {at}: {error.strerror}")


def _claim(path: Path, config_text: str) -> bool:
    """Claim an absent or empty directory by creating its config.yaml, which only one run can.

    The secret of a job's tasks may be there: they meet before one of them claims the directory.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(not each.name.startswith(SECRET_FILE) for each in path.iterdir()):
            return False
        with (path / CONFIG).open("x", encoding="utf-8") as file:
            file.write(config_text)
    except FileExistsError:  # the path is a file, or another run was faster
        if not os.path.lexists(path):  # a folder above it is a link to nowhere
            raise
        return False
    return True


def _json_line(values: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(values, allow_nan=False)
    except (TypeError, ValueError):  # most values are plain already
        text = json.dumps(plain_json(values), allow_nan=False)
    return with_sum(text) + "\n"


def plain_json(value: Any) -> Any:
    """The value in JSON's types: arrays and NumPy scalars as lists and numbers, NaN as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner) for inner in value]
    return value
