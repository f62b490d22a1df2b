"""Measures the blocks of a comparison one after another, and writes the results."""

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from statistics import fmean
from typing import Any

from jaxmorph.compare.blocks import (
    Block,
    ComparisonMessage,
    Key,
    all_keys,
    reopen,
    write_block,
)
from jaxmorph.compare.condition_links import round_links
from jaxmorph.compare.matrix_record import comparison_matrix, comparison_notes, typical_round
from jaxmorph.compare.provenance import (
    ProcessorTimes,
    configuration_digest,
    load_averages,
    others_share,
    processor_times,
    provenance,
)
from jaxmorph.compare.systems import SYSTEMS, System, system_config
from jaxmorph.compare.whole_runs import RUNS, run_whole, whole_config
from jaxmorph.config import Config, load_config, located_error, locating_errors
from jaxmorph.config.compare_section import Compare
from jaxmorph.errors import RunFailedError, RunStoppedError, UserError
from jaxmorph.plain_json import parse
from jaxmorph.report.matrix_table import matrix_markdown
from jaxmorph.report.page import REPORT, write_report
from jaxmorph.report.run_directory import CONFIG, claim_run_directory, plain_json, replace_file
from jaxmorph.report.run_matrix import BLOCK_COLUMNS, RESULTS, TIMELINES, Matrix, Provenance, Run
from jaxmorph.report.terminal import MatrixView
from jaxmorph.report.text import duration
from jaxmorph.runtime.launcher import run_ranks, threads_for
from jaxmorph.training.start import check_run
from jaxmorph.training.start_lines import StartLines
from jaxmorph.transport.host import num_processors

TABLE, FIGURE, RECOVERY_FIGURE = "table.md", "figure.png", "recovery.png"


def run_comparison(
    given: Sequence[str], resume: str | None = None, *, redo_disturbed: bool = False
) -> int:
    """Measure the blocks that a comparison lacks; all if it is new.

    Args:
        given: The configuration's path and overrides. With the directory to resume, overrides only.
        resume: The comparison's directory; "auto": the configuration's `run.dir`, which may be new;
            None: a new one.
        redo_disturbed: Whether to measure again the blocks that other work disturbed.

    Returns:
        The number of systems that failed.

    Raises:
        RunStoppedError: It was asked to end during a whole run, which has saved its state.
    """
    path, overrides = _configuration(given, resume)
    config = load_config(path, overrides)
    wanted = _checked(path, overrides, config)
    if resume is None:
        directory = claim_run_directory(config)
    else:
        directory = Path(config.run.dir if resume == "auto" else resume)
    with closing(MatrixView()) as view, reopen(directory, config, wanted, view.say) as blocks:
        known = (block.comparison for block in blocks.values())
        name = next(known, directory.name) if path.name == CONFIG else path.stem
        results = _Results(name, config, wanted, directory, blocks)
        keys = results.missing(redo_disturbed=redo_disturbed)
        words = [*given, *([] if resume is None else ["--resume", resume])]
        command = shlex.join(["jaxmorph", "compare", *words])
        if resume is not None:
            view.say(f"{len(keys)} of {len([*all_keys(wanted)])} blocks are to be measured")
        stay = [block for key, block in blocks.items() if key not in keys]
        for line in _changes(stay, provenance(command, "")) if keys else ():
            view.say(line)
        return _measure(results, keys, command, view)


def _changes(blocks: Iterable[Block], now: Provenance) -> Iterator[str]:
    """What has changed since blocks were measured: ratios to new ones may not hold."""
    for name in ("commit", "machine", "versions"):
        was = {getattr(block.provenance, name) for block in blocks} - {getattr(now, name)}
        if was:
            yield f"{name}: blocks are there of {', '.join(sorted(was))}, now {getattr(now, name)}"


def _configuration(given: Sequence[str], resume: str | None) -> tuple[Path, Sequence[str]]:
    """The path of a comparison's configuration, and its overrides."""
    first, others = given[:1], given[1:]
    named = [each for each in first if "=" not in each or _is_file(each)]
    if resume in (None, "auto"):
        if not named:
            raise UserError(
                "compare: got no configuration, expected a YAML file, or --resume RUN_DIR"
            )
        return Path(named[0]), others
    if named:
        raise UserError(
            f"--resume: got {named[0]} beside {resume}, expected the directory alone, or --resume "
            "auto"
        )
    path = Path(str(resume)) / CONFIG
    if not path.is_file():
        expected = f"expected a comparison's directory, with a {CONFIG}"
        raise UserError(f"--resume: got {resume}, {expected}")
    return path, given


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except OSError:  # an override that is too long for a file name
        return False


def _measure(results: "_Results", keys: Sequence[Key], command: str, view: MatrixView) -> int:
    """Measure blocks; returns the number of systems that failed.

    Args:
        command: For the provenance.
    """
    wanted, directory = results.wanted, results.directory
    digest = configuration_digest(results.config)
    view.say(f"writes {directory}")
    if "left aside" in results.notes:
        view.say(f"left aside: {results.notes['left aside']}")
    failed: set[str] = set()
    try:
        for index, (system, number) in enumerate(keys):
            if system in failed and not wanted.has_whole_runs:
                continue  # its other blocks would fail as well; they stay missing
            took_s = [block.took_s for block in results.blocks.values()]
            place = _place(number, wanted.num_blocks, len(keys) - index, took_s)
            block = Block(results.name, system, number, provenance(command, digest))
            measure = _run_whole if wanted.has_whole_runs else _run_ranks
            if measure(block, results, view, place).failure is not None:
                failed.add(system)
    except (KeyboardInterrupt, RunStoppedError):
        view.say(f"to continue: jaxmorph compare --resume {shlex.quote(str(directory))}")
        raise
    for complaint in results.write() if not keys else ():
        view.say(complaint)
    for bar in results.matrix().bars:
        view.say(str(bar))
    names = RESULTS, TABLE, FIGURE, RECOVERY_FIGURE, TIMELINES, REPORT
    written = [str(directory / name) for name in names if (directory / name).is_file()]
    view.say(f"wrote {', '.join(written)}")
    return len(failed | results.failed)


def _place(number: int, num_blocks: int, num_left: int, took_s: Sequence[float]) -> str:
    """Which of a system's blocks is next, and how long the remaining blocks may take.

    Args:
        took_s: How long blocks took.
    """
    about = f", about {duration(num_left * fmean(took_s))}" if took_s else ""
    return f"block {number} of {num_blocks}; {num_left} left{about}"


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
    if not config.compare.has_whole_runs:  # traces of whole runs are checked with the runs
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
    """The blocks of a comparison, and the files that are made from them."""

    def __init__(
        self,
        name: str,
        config: Config,
        wanted: Compare,
        directory: Path,
        blocks: Mapping[Key, Block],
    ) -> None:
        self.name, self.config, self.wanted, self.directory = name, config, wanted, directory
        self.notes = comparison_notes(config, wanted)
        self.blocks = dict(blocks)

    def missing(self, *, redo_disturbed: bool) -> list[Key]:
        """The blocks that are missing or failed and, if asked for, those that were disturbed."""
        return [
            key
            for key in all_keys(self.wanted)
            if (block := self.blocks.get(key)) is None
            or block.failure is not None
            or (redo_disturbed and block.load.is_disturbed)
        ]

    @property
    def failed(self) -> set[str]:
        """The systems with a failed block or a failed whole run."""
        return {
            block.system
            for block in self.blocks.values()
            if block.failure is not None or (block.run is not None and block.run.failed is not None)
        }

    def matrix(self, at_work: Block | None = None) -> Matrix:
        """The runs so far, also with a block that is being measured."""
        blocks = self.blocks | ({} if at_work is None else {at_work.key: at_work})
        return comparison_matrix(self.wanted, self.name, blocks.values(), self.notes)

    def keep(self, block: Block) -> None:
        """Write a block's file, but never replace a complete block with a failed one."""
        before = self.blocks.get(block.key)
        if block.failure is None or before is None or before.failure is not None:
            write_block(self.directory, block)
            self.blocks[block.key] = block

    def write(self) -> list[str]:
        """Write all files with the runs so far; returns a line for each file that failed."""
        # Imported here, so that a mistake in the configuration is reported before a slow import.
        from jaxmorph.report.matrix_figure import matrix_figure, recovery_figure, save_figure

        matrix, directory = self.matrix(), self.directory
        results = json.dumps(plain_json(matrix.to_json()), indent=1) + "\n"
        made: dict[str, Callable[[], object]] = {
            RESULTS: lambda: replace_file(directory / RESULTS, results),
            TABLE: lambda: replace_file(directory / TABLE, matrix_markdown(matrix)),
            TIMELINES: lambda: replace_file(directory / TIMELINES, self._timelines()),
            FIGURE: lambda: save_figure(directory / FIGURE, matrix_figure, matrix),
            REPORT: lambda: write_report(directory),
        }
        if matrix.has_whole_runs:
            path = directory / RECOVERY_FIGURE
            made[RECOVERY_FIGURE] = lambda: save_figure(path, recovery_figure, matrix)
        return [*filter(None, map(_failure, made, made.values()))]

    def _timelines(self) -> str:
        """The contents of `timelines.json`: by condition and system, a typical measured step."""
        typical_steps = {
            condition.name: {
                system: typical.timeline | {"step_ms": typical.timeline_ms}
                for system in self.wanted.systems
                if (typical := typical_round(self._of_system(system), index)) is not None
            }
            for index, condition in enumerate(self.wanted.conditions)
        }
        return json.dumps(typical_steps) + "\n"

    def _of_system(self, system: str) -> list[Block]:
        return [block for block in self.blocks.values() if block.system == system]


def _failure(name: str, make: Callable[[], object]) -> str | None:
    """Write a file; returns why that failed, if it did."""
    try:
        make()
    except Exception as error:  # the results are written, and other systems are still to run
        first_line = (str(error).splitlines() or [""])[0]
        return f"could not write {name}: {type(error).__name__}: {first_line}"
    return None


def _run_ranks(block: Block, results: _Results, view: MatrixView, place: str) -> Block:
    """Measure a block of a system by its ranks; returns it, with the reason if it failed."""
    system, config, before = block.system, results.config, processor_times()
    lines = StartLines(lambda line: view.update(results.matrix(), f"{system} is starting: {line}"))

    def take(message: dict[str, Any]) -> None:
        nonlocal block
        lines.end()
        parsed = parse(ComparisonMessage, message, "a message of a rank")
        block = block.with_message(parsed, load_averages()[0])
        view.update(results.matrix(block), f"{system} is running ({place})")

    view.update(results.matrix(), f"{system} is starting ({place})")
    failure: str | None = "interrupted"
    lines.begin()
    try:
        run_ranks(
            "jaxmorph.compare.rank",
            [str(results.directory / CONFIG), system, str(block.number)],
            config.parallelism.stages,
            results.directory / "logs" / f"{system}-{block.number}",
            take,
            on_look=lines.look,
            least_threads=threads_for(system_config(config, SYSTEMS[system])),
        )
        is_whole = len(block.rounds) == len(results.wanted.conditions)
        failure = None if is_whole else "its ranks ended early"
    except (RunFailedError, UserError) as error:
        view.say(f"{system} failed: {error}")
        failure = "; ".join(str(error).splitlines()[:2])  # without the last lines of the log
        if isinstance(error, UserError):
            raise
    finally:
        block = _keep(replace(block, failure=failure), before, results, view)
        _say_results(system, results.matrix(), view)
    return block


def _run_whole(block: Block, results: _Results, view: MatrixView, place: str) -> Block:
    """Make a whole run; returns it, with the reason to repeat it if it was stopped."""
    name, before = block.system, processor_times()
    condition = results.wanted.conditions[block.number - 1]
    run: Run | None = None
    failure: str | None = "interrupted"

    def put(done: Run) -> None:
        nonlocal run
        run = done

    view.update(results.matrix(), f"{name} is running under '{condition.name}' ({place})")
    directory = _new_folder(results.directory / RUNS, f"{name}-{block.number}")
    try:
        run_whole(results.config, SYSTEMS[name], condition, directory, view.say, put)
        failure = None
    except UserError as error:
        failure = str(error)
        raise
    except (KeyboardInterrupt, RunStoppedError):
        failure = failure if run is None else run.failed  # it may have been in its last step
        raise
    finally:
        block = _keep(replace(block, run=run, failure=failure), before, results, view)
        if run is not None and run.total_s is not None:
            total = f"{name:19} {run.condition:20} {run.total_s:8.1f} s"
            shown = f"{len(run.recoveries)} restarts, goodput {run.goodput or 0.0:.1%}"
            view.say(f"{total}, {shown}")
    return block


def _new_folder(within: Path, name: str) -> Path:
    """A folder that doesn't exist yet: the folder of a stopped run is kept."""
    numbered = (within / f"{name}-again-{number}" for number in count(1))
    return next(path for path in chain([within / name], numbered) if not path.exists())


def _keep(block: Block, before: ProcessorTimes, results: _Results, view: MatrixView) -> Block:
    """Complete a block that has ended, and write it and the results."""
    after = processor_times()
    block = replace(
        block,
        provenance=replace(block.provenance, load_after=load_averages()),
        took_s=after.at_s - before.at_s,
        others_share=others_share(before, after, num_processors()),
    )
    results.keep(block)
    for complaint in results.write():
        view.say(complaint)
    view.update(results.matrix(), "")
    loads = ", ".join(map(" ".join, zip(BLOCK_COLUMNS, block.load.cells(), strict=True)))
    view.say(f"{loads}, took {duration(block.took_s)}")
    return block


def _say_results(system: str, matrix: Matrix, view: MatrixView) -> None:
    for condition in matrix.conditions:
        run = matrix.runs.get((system, condition))
        if run and run.step_ms and run.plan and not run.blocks_to_come:
            times = run.step_ms
            view.say(
                f"{system:19} {condition:20} {times.median:8.1f} ms "
                f"({times.p10:.1f} to {times.p90:.1f}), predicted {run.plan.predicted_ms:.1f}"
                f"{f', {run.marks}' if run.marks else ''}"
            )
