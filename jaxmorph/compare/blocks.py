"""The blocks of a comparison: the parts that are measured in one go, each kept as one file.

A block is one launch of a system's ranks, for one round of all conditions; with whole runs it is
one run. All results are made from blocks, so a stopped comparison loses only the block in progress.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from jaxmorph.compare.provenance import configuration_digest, measured_differences
from jaxmorph.config import Config, dump_config, load_config
from jaxmorph.config.compare_section import Compare
from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.plain_json import Json, ParseError, dump, parse_line, with_sum
from jaxmorph.report.run_directory import CONFIG, replace_file
from jaxmorph.report.run_matrix import BlockLoad, PlannedRun, Provenance, Run
from jaxmorph.training.resume import hold

FOLDER = "blocks"


@dataclass(frozen=True)
class RoundPlanned:
    """A plan for one condition. One for each condition is sent before the first round.

    Rounds with a trace, and rounds of a system that detects, send another when they end.

    Attributes:
        condition: The condition's number.
        plan: At the end of a round, its prediction is for the round's mean delays.
    """

    condition: int
    plan: PlannedRun


@dataclass(frozen=True)
class RoundMeasured:
    """The measured steps of a round; a tuple has an item for each step.

    Attributes:
        condition: The condition's number.
        blocking: For each step and stage, a share of the step; the same for `dependency` and
            `other`.
        peak_on_device: For each step and stage, the most stashes on the device at once.
        events: The number of events by kind.
        timeline: `Timeline.to_json` of the step nearest to the median.
        timeline_ms: The length of that step.
    """

    condition: int
    step_ms: tuple[float, ...]
    loss: tuple[float, ...]
    bubble_rate: tuple[float, ...]
    blocking: tuple[tuple[float, ...], ...]
    dependency: tuple[tuple[float, ...], ...]
    other: tuple[tuple[float, ...], ...]
    peak_on_device: tuple[tuple[int, ...], ...]
    events: Mapping[str, int]
    timeline: Json
    timeline_ms: float


ComparisonMessage: TypeAlias = RoundPlanned | RoundMeasured
"""A message from rank 0 of a system."""


Key: TypeAlias = tuple[str, int]
"""A system, and the number of its block, from 1."""


@dataclass(frozen=True)
class Block:
    """What was measured in one go.

    Attributes:
        comparison: The comparison's name.
        number: The number of the system's block, from 1; with whole runs, of the condition.
        provenance: With the load before and after.
        messages: Of the ranks, in their order.
        load_during: The load average of a minute at the end of each measured round.
        run: A whole run.
        took_s: Start and end included.
        others_share: The mean share of the processors that other processes kept busy; None: not
            known.
        failure: Why it must be measured again; None: it is complete.
    """

    comparison: str
    system: str
    number: int
    provenance: Provenance
    messages: tuple[ComparisonMessage, ...] = ()
    load_during: tuple[float, ...] = ()
    run: Run | None = None
    took_s: float = 0.0
    others_share: float | None = None
    failure: str | None = None

    @property
    def key(self) -> Key:
        """Which one it is."""
        return self.system, self.number

    @property
    def rounds(self) -> list[RoundMeasured]:
        """What was measured in each round, in their order."""
        return [each for each in self.messages if isinstance(each, RoundMeasured)]

    @property
    def load(self) -> BlockLoad:
        """What else the machine did meanwhile."""
        source = self.provenance
        loads = source.load_before, self.load_during, source.load_after or ()
        return BlockLoad(*self.key, source.date, *loads, self.others_share)

    def with_message(self, message: ComparisonMessage, load: float) -> "Block":
        """The block with one message more, which came when the machine's load was `load`."""
        loads = (load,) if isinstance(message, RoundMeasured) else ()
        return replace(
            self,
            messages=(*self.messages, message),
            load_during=(*self.load_during, *loads),
        )

    def plan(self, condition: int) -> PlannedRun | None:
        """The last plan for a condition."""
        for message in reversed(self.messages):
            if isinstance(message, RoundPlanned) and message.condition == condition:
                return message.plan
        return None


def all_keys(compare: Compare) -> Iterator[Key]:
    """All blocks in the order of measurement: block 1 of every system, then block 2, and so on."""
    for number in range(1, compare.num_blocks + 1):
        for system in compare.systems:
            yield system, number


def joint_provenance(blocks: Iterable[Block]) -> Provenance | None:
    """Where the results of blocks are from: since the first began, until the last ended."""
    sources = sorted((block.provenance for block in blocks), key=lambda source: source.date)
    if not sources:
        return None
    return replace(
        sources[0],
        load_after=sources[-1].load_after,
        **{
            name: ", then ".join(dict.fromkeys(getattr(source, name) for source in sources))
            for name in ("commit", "machine", "versions")
        },
    )


@contextmanager
def reopen(
    directory: Path, config: Config, wanted: Compare, say: Callable[[str], None]
) -> Iterator[dict[Key, Block]]:
    """Open a comparison's directory for this process alone, and write its configuration there.

    Yields the blocks that it has.

    Args:
        directory: Made if it is missing.
        say: Takes a line about each block that is damaged, which counts as missing.

    Raises:
        UserError: It can't be written to, is in use, has other contents, or has blocks that another
            configuration measured.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(directory, error) from error
    path = directory / CONFIG
    if not path.is_file() and any(not each.name.startswith(".") for each in directory.iterdir()):
        raise UserError(f"--resume: got {directory}, expected a comparison's directory, or none")
    with hold([directory]):
        blocks = _read_blocks(directory, wanted, say)
        was = load_config(path) if path.is_file() else config
        _require_same(config, was, wanted, directory, blocks)
        try:
            replace_file(path, dump_config(config))
        except OSError as error:
            raise _cannot_write(path, error) from error
        yield {block.key: block for block in blocks}


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"run.dir: {path}: cannot be written: {error.strerror}")


def _require_same(
    config: Config, was: Config, wanted: Compare, directory: Path, blocks: Sequence[Block]
) -> None:
    """Require that blocks were measured with `config`; `was` is the one in their directory."""
    if was.compare is None:
        raise UserError(f"--resume: got {directory}, the directory of a run, not of a comparison")
    if not (directory / FOLDER).is_dir():
        return
    # The blocks of systems that are no longer compared were not read: `was` stands for them.
    digests: set[str | None] = {block.provenance.configuration for block in blocks}
    with suppress(OSError):  # a trace of the configuration there is gone
        digests.add(configuration_digest(was))
    if digests != {configuration_digest(config)}:
        other = ", ".join(measured_differences(config, was)) or "contents of a trace"
        raise UserError(
            f"--resume: got other {other} than the blocks in {directory} were measured with, "
            "expected the same"
        )
    if was.compare.has_whole_runs != wanted.has_whole_runs:
        raise UserError(
            f"--resume: got systems that restart beside blocks of others in {directory}, or the "
            "reverse, expected another run.dir"
        )


def _read_blocks(directory: Path, wanted: Compare, say: Callable[[str], None]) -> list[Block]:
    found: list[Block | None] = []
    for key in all_keys(wanted):
        try:
            found.append(_read_block(directory, key))
        except ParseError as error:
            say(f"{error}; the block is measured again")
    return [block for block in found if block is not None]


def write_block(directory: Path, block: Block) -> None:
    """Write or replace a block's file in a comparison's directory.

    Raises:
        RunFailedError: It can't be written.
    """
    path = _path(directory, block.key)
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, with_sum(dump(block)) + "\n")
    except OSError as error:
        raise RunFailedError(f"{path}: cannot be written: {error.strerror}") from error


def _read_block(directory: Path, key: Key) -> Block | None:
    """Read a block's file; None: there is none.

    Raises:
        ParseError: It is not what was written.
    """
    path = _path(directory, key)
    try:
        block = parse_line(Block, path.read_text(encoding="utf-8", errors="replace"), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ParseError(f"{path}: cannot be read: {error.strerror}") from error
    if block.key != key:
        raise ParseError(f"{path}: got block {block.number} of {block.system}, expected its own")
    return block


def _path(directory: Path, key: Key) -> Path:
    system, number = key
    return directory / FOLDER / f"{system}-{number}.json"
