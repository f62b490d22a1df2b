"""The directory a run writes: its configuration, metrics, events, traces and profile."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
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
"""The kinds of events about failures and restarts: they stay when their steps are done again."""
_Line = TypeVar("_Line", StepRecord, Event)


@dataclass(frozen=True)
class RecoveryFile:
    """What is read of `recovery.json`.

    Attributes:
        goodput: Which share of the run's time was spent in steps that stayed; None: unknown.
        recoveries: What each failure has cost, as `Recovery.to_json` writes it.
    """

    goodput: float | None = None
    recoveries: tuple[Json, ...] = ()


class RunDirectory:
    """An open run directory; each line is on its way to disk when its call returns.

    Args:
        path: An existing directory that belongs to this run alone.
        resumed: Whether lines come after those that are there already.
        tensorboard: Where steps are written to besides; closed with the directory.
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
        """Appends a step to `metrics.jsonl`; numbers that are not finite are written as null."""
        self._metrics.write(_json_line(record.metrics()))
        if self._tensorboard is not None:
            self._tensorboard.write_step(record)

    def write_event(self, event: Event) -> None:
        """Appends an event to `events.jsonl`."""
        self._events.write(_json_line(event.line()))
        if self._tensorboard is not None and event.kind == EventKind.CHECKPOINT_SAVED:
            self._tensorboard.flush()  # a run that goes on from there won't do its steps again

    def write_profile(self, profile: Mapping[str, Any]) -> None:
        """Writes what ops and links cost to `profile.json`, in place of what was there."""
        _replace(self.path / PROFILE, _json_line(profile))

    def write_links(self, values: Mapping[str, Any]) -> None:
        """Writes what is known of degraded links to `links.json`, in place of what was there."""
        _replace(self.path / LINKS, _json_line(values))

    def write_observation(self, line: str, *, begins: bool) -> None:
        """Appends a line to the newest file of `control/`, or begins another one with it.

        The oldest files make room, if all together are larger than 32 MiB.
        """
        if begins:
            folder = self.path / CONTROL
            folder.mkdir(exist_ok=True)
            files = sorted(folder.glob("*.jsonl"))
            while len(files) > 1 and sum(map(_size, files)) > _MOST_CONTROL_BYTES:
                files.pop(0).unlink()
            number = int(files[-1].stem) + 1 if files else 1
            self._control = folder / f"{number:06d}.jsonl"
        if self._control is not None:
            with self._control.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def write_recovery(self, values: Mapping[str, Any]) -> None:
        """Writes what failures have cost to `recovery.json`, in place of what was there."""
        _replace(self.path / RECOVERY, json.dumps(plain_json(values), indent=1) + "\n")

    def go_back(self, step: int) -> None:
        """Takes out what is said of steps from one on, since these steps will be done again.

        See `reopen_run_directory`.

        Raises:
            UserError: It can't be written to, or a line of it is not what a run writes.
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
        """The file for a step's Chrome trace, `trace/step_N.json`, in a directory that exists."""
        directory = self.path / _TRACES
        directory.mkdir(exist_ok=True)
        return directory / f"step_{step}.json"

    def traces(self) -> dict[int, Path]:
        """The files of Chrome traces that are there, by their steps, in rising order."""
        return find_traces(self.path)

    def close(self) -> None:
        """Closes the files; safe to call twice."""
        self._metrics.close()
        self._events.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_records(path: Path, kind: type[_Line]) -> list[_Line]:
    """The lines of a run's metrics or events, but for a last one that isn't whole yet.

    Raises:
        UserError: A line is not what a run writes.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1)
    try:
        return [parse_line(kind, line, f"{path}, line {number}") for number, line in whole]
    except ParseError as error:
        raise UserError(str(error)) from error


def _size(path: Path) -> int:
    return path.stat().st_size


def find_traces(path: Path) -> dict[int, Path]:
    """The files of Chrome traces in a run directory, by their steps, in rising order."""
    found = ((_TRACE.fullmatch(trace.name), trace) for trace in (path / _TRACES).glob("*"))
    return dict(sorted((int(match[1]), trace) for match, trace in found if match))


def open_run_directory(config: Config) -> RunDirectory:
    """Makes a run's own directory (`claim_run_directory`), and opens it.

    Raises:
        UserError: No directory can be made there, or what writes for TensorBoard is missing.
    """
    if config.metrics.tensorboard:
        load_writer()  # before anything is written
    path = claim_run_directory(config)
    try:
        return RunDirectory(path, tensorboard=_tensorboard(config, path))
    except OSError as error:
        raise _cannot_write(config, error) from error


def reopen_run_directory(path: Path, config: Config, step: int) -> RunDirectory:
    """Opens the directory of a run that goes on, as if it had ended after so many steps.

    What metrics and events say of later steps is taken out, since these steps will be done again,
    and so is a last line that is there but in part. Events about failures and
    restarts stay.

    Args:
        config: Takes the place of the one that is there.
        step: How many steps have been done.

    Raises:
        UserError: It can't be written to, a line of it is not what a run writes, or what writes
            for TensorBoard is missing.
    """
    if config.metrics.tensorboard:
        load_writer()  # before anything is written
    try:
        _cut_lines(path, step)
        _replace(path / CONFIG, dump_config(config))
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
                if _is_whole(line) and wanted(parse_line(kind, line, f"{path}, line {number}"))
            ]
        _replace(path, "".join(kept))


def _is_whole(line: str) -> bool:
    """Whether a line was written to its end; the last one of a killed run may not have been."""
    return line.endswith("}\n")


def _replace(path: Path, text: str) -> None:
    """Writes a file in place of another at once: nobody ever sees half of it."""
    written = path.with_name(f"{path.name}.new")
    written.write_text(text, encoding="utf-8")
    written.replace(path)


def claim_run_directory(config: Config) -> Path:
    """Makes a directory that belongs to one run alone, and writes its configuration there.

    A directory that holds anything is left alone: the run goes into the first free one of
    `runs/demo`, `runs/demo-2`, `runs/demo-3`, and so on.

    Raises:
        UserError: No directory can be made there.
    """
    text = dump_config(config)
    try:
        return next(path for path in _candidates(Path(config.run.dir)) if _claim(path, text))
    except OSError as error:
        raise _cannot_write(config, error) from error


def _cannot_write(config: Config, error: OSError) -> UserError:
    wanted = Path(config.run.dir)
    at = error.filename or wanted
    return UserError(f"run.dir: {wanted}: cannot write {at}: {error.strerror}")


def _candidates(wanted: Path) -> Iterator[Path]:
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))
    return chain([wanted], numbered)


def _claim(path: Path, config_text: str) -> bool:
    """Takes an absent or empty directory by creating its config.yaml, which only one run can."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            return False
        with (path / CONFIG).open("x", encoding="utf-8") as file:
            file.write(config_text)
    except FileExistsError:  # a file in the way, or another run that was faster
        return False
    return True


def _json_line(values: Mapping[str, Any]) -> str:
    return json.dumps(plain_json(values), allow_nan=False) + "\n"


def plain_json(value: Any) -> Any:
    """The value in JSON's types: arrays and their scalars unpacked, NaN and infinities as null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner) for inner in value]
    return value
