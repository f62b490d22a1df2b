"""A run directory: configuration, metrics, events, traces (`docs/reference/run-files.md`)."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Self, TypeVar

from jaxmorph.config import Config, dump_config
from jaxmorph.errors import UserError
from jaxmorph.plain_json import Json, ParseError, parse_line
from jaxmorph.records import Event, EventKind, StepRecord
from jaxmorph.report.tensorboard import TensorBoardEvents, load_writer

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
PROFILE = "profile.json"
RECOVERY = "recovery.json"
LINKS = "links.json"
CONTROL = "control"
_MOST_CONTROL_BYTES = 32 << 20
_TRACES = "trace"
_TRACE = re.compile(r"step_(\d+)\.json")
_STAY = frozenset({
    EventKind.RESUMED, EventKind.CHECKPOINT_DAMAGED, EventKind.RANK_FAILED, EventKind.RESTARTED,
    EventKind.LINK_FAILED, EventKind.CHECKPOINT_FAILED,
})  # fmt: skip
"""Events about failures and restarts stay when their steps are done again."""
_Line = TypeVar("_Line", StepRecord, Event)


@dataclass(frozen=True)
class RecoveryFile:
    """The fields of `recovery.json` that are read; each recovery is a `Recovery.to_json`."""

    goodput: float | None = None
    recoveries: tuple[Json, ...] = ()


class RunDirectory:
    """An open run directory; files are line-buffered, so each call passes its line to the OS.

    Args:
        path: An existing directory that belongs to this run alone.
        resumed: Append to the files that are there.
        tensorboard: Gets the steps too; closed with the directory.
    """

    def __init__(
        self, path: Path, *, resumed: bool = False, tensorboard: TensorBoardEvents | None = None
    ):
        self.path = path
        self._open_files("a" if resumed else "x")
        self._tensorboard = tensorboard
        self._control: Path | None = None

    def _open_files(self, mode: str) -> None:
        self._metrics = (self.path / METRICS).open(mode, encoding="utf-8", buffering=1)
        self._events = (self.path / EVENTS).open(mode, encoding="utf-8", buffering=1)

    def write_step(self, record: StepRecord) -> None:
        """Append a step to `metrics.jsonl`; numbers that are not finite become null."""
        self._metrics.write(_json_line(record.metrics()))
        if self._tensorboard is not None:
            self._tensorboard.write_step(record)

    def write_event(self, event: Event) -> None:
        """Append an event to `events.jsonl`."""
        self._events.write(_json_line(event.line()))
        if self._tensorboard is not None and event.kind == EventKind.CHECKPOINT_SAVED:
            self._tensorboard.flush()  # a run that resumes from here never writes these steps again

    def write_profile(self, profile: Mapping[str, Any]) -> None:
        """Replace `profile.json`, the measured costs of ops and links."""
        replace_file(self.path / PROFILE, _json_line(profile))

    def write_links(self, values: Mapping[str, Any]) -> None:
        """Replace `links.json`, the degraded links."""
        replace_file(self.path / LINKS, _json_line(values))

    def write_observation(self, line: str, *, begins: bool) -> None:
        """Append a line to the newest file in `control/`, or begin a new file with it.

        The oldest files are removed while all together exceed 32 MiB.
        """
        if begins:
            folder = self.path / CONTROL
            folder.mkdir(exist_ok=True)
            files = sorted(folder.glob("*.jsonl"))
            while len(files) > 1 and _total_bytes(files) > _MOST_CONTROL_BYTES:
                files.pop(0).unlink()
            number = int(files[-1].stem) + 1 if files else 1
            self._control = folder / f"{number:06d}.jsonl"
        if self._control is not None:
            with self._control.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def write_recovery(self, values: Mapping[str, Any]) -> None:
        """Replace `recovery.json`, the goodput and the cost of failures."""
        replace_file(self.path / RECOVERY, json.dumps(plain_json(values), indent=1) + "\n")

    def go_back(self, step: int) -> None:
        """Remove the lines of `step` and later steps, as `reopen_run_directory` does.

        Raises:
            UserError: A file can't be written, or has a line that no run writes.
        """
        self.close()
        try:
            _cut_lines(self.path, step)
            self._open_files("a")
            if self._tensorboard is not None:
                self._tensorboard = TensorBoardEvents(self.path, step)
        except ParseError as error:
            raise UserError(f"run.dir: {error}") from error
        except OSError as error:
            raise UserError(f"run.dir: {self.path}: cannot write: {error.strerror}") from error

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
        self._metrics.close()
        self._events.close()
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
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1)
    try:
        return [parse_line(kind, line, f"{path}, line {number}") for number, line in whole]
    except ParseError as error:
        raise UserError(str(error)) from error


def _total_bytes(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


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
    about failures and restarts. An unfinished last line is removed too.

    Raises:
        UserError: A file can't be written or has a line that no run writes, or tensorboardX is
            missing.
    """
    if config.metrics.tensorboard:
        load_writer()  # before anything is written
    try:
        _cut_lines(path, step)
        replace_file(path / CONFIG, dump_config(config))
        return RunDirectory(path, resumed=True, tensorboard=_tensorboard(config, path, step))
    except ParseError as error:
        raise UserError(f"--resume: {error}") from error
    except OSError as error:
        raise UserError(f"--resume: {path}: cannot write: {error.strerror}") from error


def _tensorboard(config: Config, path: Path, first_step: int = 0) -> TensorBoardEvents | None:
    return TensorBoardEvents(path, first_step) if config.metrics.tensorboard else None


def _cut_lines(path: Path, step: int) -> None:
    _keep_lines(path / METRICS, StepRecord, lambda record: record.step < step)
    _keep_lines(path / EVENTS, Event, lambda event: event.step < step or event.kind in _STAY)


def _keep_lines(path: Path, kind: type[_Line], wanted: Callable[[_Line], bool]) -> None:
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            kept = [
                line
                for number, line in enumerate(file, start=1)
                if line.endswith("}\n")  # the last line of a killed run may be cut off
                and wanted(parse_line(kind, line, f"{path}, line {number}"))
            ]
        replace_file(path, "".join(kept))


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically: no reader sees half of it."""
    written = path.with_name(f"{path.name}.new")
    written.write_text(text, encoding="utf-8")
    written.replace(path)


def claim_run_directory(config: Config) -> Path:
    """Make a directory for one run alone, and write its configuration there.

    It is the first of `runs/demo`, `runs/demo-2`, `runs/demo-3`, ... that is absent or empty.

    Raises:
        UserError: The directory can't be made.
    """
    text, wanted = dump_config(config), Path(config.run.dir)
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
    """Claim an absent or empty directory by creating its config.yaml, which one run alone can."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            return False
        with (path / CONFIG).open("x", encoding="utf-8") as file:
            file.write(config_text)
    except FileExistsError:  # the path is a file, or another run was faster
        return False
    return True


def _json_line(values: Mapping[str, Any]) -> str:
    return json.dumps(plain_json(values), allow_nan=False) + "\n"


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
