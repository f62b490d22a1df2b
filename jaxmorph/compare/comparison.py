"""Runs the systems of a comparison one after another, and writes the results."""

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxmorph.compare.condition_links import round_links
from jaxmorph.compare.matrix_record import (
    MatrixRecord,
    comparison_notes,
    parse_comparison_message,
)
from jaxmorph.compare.provenance import (
    Provenance,
    configuration_digest,
    load_averages,
    provenance,
)
from jaxmorph.compare.systems import SYSTEMS, System, system_config
from jaxmorph.compare.whole_runs import RUNS, run_whole, whole_config
from jaxmorph.config import Config, load_config, located_error, locating_errors
from jaxmorph.config.compare_section import Compare
from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.report.matrix_table import matrix_markdown
from jaxmorph.report.page import REPORT, write_report
from jaxmorph.report.run_directory import claim_run_directory, plain_json, replace_file
from jaxmorph.report.run_matrix import RESULTS, TIMELINES, Matrix, Run
from jaxmorph.report.terminal import MatrixView
from jaxmorph.report.text import duration
from jaxmorph.runtime.launcher import run_ranks, threads_for
from jaxmorph.training.start import check_run
from jaxmorph.training.start_lines import StartLines

TABLE, FIGURE, RECOVERY_FIGURE = "table.md", "figure.png", "recovery.png"


def start_comparison(path: Path, overrides: Sequence[str]) -> int:
    """Run a configuration's comparison; returns the number of systems that failed.

    Raises:
        RunStoppedError: It was asked to end during a whole run, which has saved its state.
    """
    config = load_config(path, overrides)
    wanted = _checked(path, overrides, config)
    directory = claim_run_directory(config)
    command = shlex.join(["jaxmorph", "compare", str(path), *overrides])
    notes = comparison_notes(config, wanted)
    begins = provenance(command, configuration_digest(config))
    results = _Results(path.stem, wanted, directory, notes, begins)
    with closing(MatrixView()) as view:
        view.say(f"writes {directory}")
        if "left aside" in notes:
            view.say(f"left aside: {notes['left aside']}")
        began_s = time.monotonic()
        for number, system in enumerate(wanted.systems):
            place = _place(number, len(wanted.systems), time.monotonic() - began_s)
            if wanted.has_whole_runs:
                _run_whole_system(system, config, wanted, results, view, place)
            else:
                _run_system(system, config, results, view, place)
        names = RESULTS, TABLE, FIGURE, RECOVERY_FIGURE, TIMELINES, REPORT
        written = [str(directory / name) for name in names if (directory / name).is_file()]
        for bar in results.matrix().bars:
            view.say(str(bar))
        view.say(f"wrote {', '.join(written)}")
    return len(results.record.failures)


def _place(num_done: int, num_systems: int, took_s: float) -> str:
    """Which system is next, and how long all that are left may take."""
    left_s = took_s / num_done * (num_systems - num_done) if num_done else 0.0
    about = f", about {duration(left_s)} left" if num_done else ""
    return f"{num_done + 1} of {num_systems} systems{about}"


def _checked(path: Path, overrides: Sequence[str], config: Config) -> Compare:
    """The section `compare`, once every system is checked against model, data and caps."""
    if config.compare is None:
        raise UserError(f"{path}: compare: missing, expected a section with conditions")
    for system in config.compare.systems:
        try:
            for planned in _configs(config, config.compare, SYSTEMS[system]):
                check_run(planned)
        except UserError as error:
            placed = located_error(path, overrides, error)
            raise UserError(f"{placed} (for system {system!r})") from error
    _check_traces(path, overrides, config.compare, config.parallelism.stages)
    return config.compare


def _configs(config: Config, wanted: Compare, system: System) -> Iterator[Config]:
    """The configurations that a system runs."""
    if wanted.has_whole_runs:
        for condition in wanted.conditions:
            yield whole_config(config, system, condition, Path(config.run.dir))
    else:
        yield system_config(config, system)


def _check_traces(path: Path, overrides: Sequence[str], wanted: Compare, num_stages: int) -> None:
    for index, condition in enumerate(wanted.conditions):
        with locating_errors(path, overrides):
            round_links(condition, num_stages, f"compare.conditions.{index}")


class _Results:
    """The record of a comparison, and its files."""

    def __init__(
        self,
        name: str,
        wanted: Compare,
        directory: Path,
        notes: Mapping[str, str],
        begins: Provenance,
    ) -> None:
        self.record = MatrixRecord(wanted, name)
        self.directory = directory
        self._notes, self._begins = dict(notes), begins

    def matrix(self) -> Matrix:
        """The runs so far."""
        return self.record.matrix(self._notes, replace(self._begins, load_after=load_averages()))

    def write(self) -> list[str]:
        """Write all files with the runs so far; returns a line for each file that failed."""
        # Imported here, so that a mistake in the configuration is reported before a slow import.
        from jaxmorph.report.matrix_figure import matrix_figure, recovery_figure, save_figure

        matrix, directory = self.matrix(), self.directory
        results = json.dumps(plain_json(matrix.to_json()), indent=1) + "\n"
        made: dict[str, Callable[[], object]] = {
            RESULTS: lambda: replace_file(directory / RESULTS, results),
            TABLE: lambda: replace_file(directory / TABLE, matrix_markdown(matrix)),
            TIMELINES: lambda: replace_file(directory / TIMELINES, _timelines(self.record, matrix)),
            FIGURE: lambda: save_figure(directory / FIGURE, matrix_figure, matrix),
            REPORT: lambda: write_report(directory),
        }
        if matrix.has_whole_runs:
            path = directory / RECOVERY_FIGURE
            made[RECOVERY_FIGURE] = lambda: save_figure(path, recovery_figure, matrix)
        return [*filter(None, map(_failure, made, made.values()))]


def _failure(name: str, make: Callable[[], object]) -> str | None:
    """Write a file; returns why that failed, if it did."""
    try:
        make()
    except Exception as error:  # the results are written, and other systems are still to run
        first_line = (str(error).splitlines() or [""])[0]
        return f"could not write {name}: {type(error).__name__}: {first_line}"
    return None


def _run_system(
    system: str, config: Config, results: _Results, view: MatrixView, place: str
) -> None:
    lines = StartLines(lambda line: view.update(results.matrix(), f"{system} is starting: {line}"))

    def take(message: dict[str, Any]) -> None:
        lines.end()
        results.record.take(system, parse_comparison_message(message), load_averages()[0])
        view.update(results.matrix(), f"{system} is running ({place})")

    view.update(results.matrix(), f"{system} is starting ({place})")
    arguments = [str(results.directory / "config.yaml"), system]
    logs = results.directory / "logs" / system
    failure: str | None = "interrupted"
    lines.begin()
    try:
        run_ranks(
            "jaxmorph.compare.rank",
            arguments,
            config.parallelism.stages,
            logs,
            take,
            on_look=lines.look,
            least_threads=threads_for(system_config(config, SYSTEMS[system])),
        )
        failure = None
    except (RunFailedError, UserError) as error:
        view.say(f"{system} failed: {error}")
        failure = "; ".join(str(error).splitlines()[:2])  # without the last lines of the log
        if isinstance(error, UserError):
            raise
    finally:
        results.record.finish(system, failure)
        for complaint in results.write():
            view.say(complaint)
        view.update(results.matrix(), "")
        _say_results(system, results.matrix(), view)


def _run_whole_system(
    name: str, config: Config, wanted: Compare, results: _Results, view: MatrixView, place: str
) -> None:
    """Run a system under each condition; a failed run doesn't keep the next from starting."""
    failures: list[str] = []

    def put(run: Run) -> None:
        results.record.put(replace(run, load=(load_averages()[0],)))
        failures.extend([] if run.failed is None else [f"{run.condition}: {run.failed}"])
        for complaint in results.write():
            view.say(complaint)
        if run.total_s is not None:
            total = f"{name:19} {run.condition:20} {run.total_s:8.1f} s"
            view.say(f"{total}, {len(run.recoveries)} restarts, goodput {run.goodput or 0.0:.1%}")

    for number, condition in enumerate(wanted.conditions):
        view.update(results.matrix(), f"{name} is running under '{condition.name}' ({place})")
        directory = results.directory / RUNS / f"{name}-{number}"
        run_whole(config, SYSTEMS[name], condition, directory, view.say, put)
    results.record.finish(name, "; ".join(failures) or None)
    for complaint in results.write():
        view.say(complaint)
    view.update(results.matrix(), "")


def _say_results(system: str, matrix: Matrix, view: MatrixView) -> None:
    for condition in matrix.conditions:
        run = matrix.runs.get((system, condition))
        if run is not None and run.step_ms is not None and run.plan is not None:
            times = run.step_ms
            view.say(
                f"{system:19} {condition:20} {times.median:8.1f} ms "
                f"({times.p10:.1f} to {times.p90:.1f}), predicted {run.plan.predicted_ms:.1f}"
                f"{', noisy' if run.noisy else ''}"
            )


def _timelines(record: MatrixRecord, matrix: Matrix) -> str:
    """The contents of `timelines.json`: by condition and system, a typical measured step."""
    typical_steps = {
        condition: {
            system: typical[1].to_json() | {"step_ms": typical[0]}
            for system in matrix.systems
            if (typical := record.typical_step(system, condition)) is not None
        }
        for condition in matrix.conditions
    }
    return json.dumps(typical_steps) + "\n"
