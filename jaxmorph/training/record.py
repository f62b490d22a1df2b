"""Writes rank 0's messages to the run directory, and shows them to the user.

Steps and events are already in their files: rank 0 writes those itself (`StepRecorder`). So no
checkpoint lacks the steps before it, even if this process is held up.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxmorph.config import Config
from jaxmorph.config.schema import IN_A_V
from jaxmorph.control.rank_times import RankTimes, timeline_of
from jaxmorph.errors import UserError
from jaxmorph.messages import (
    EventEmitted,
    LinksChanged,
    PhaseEnded,
    ProfileUpdated,
    RunMessage,
    RunStarted,
    StepDone,
    StepTimelines,
)
from jaxmorph.output import write_stderr
from jaxmorph.plain_json import Json, parse_line, with_sum
from jaxmorph.records import (
    COMPILE,
    RESTORE,
    START,
    Event,
    EventKind,
    Goodput,
    RunHeader,
    StepRecord,
)
from jaxmorph.report.draw.save import save_timelines
from jaxmorph.report.draw.trace import chrome_trace
from jaxmorph.report.history import RunHistory
from jaxmorph.report.run_directory import RunDirectory
from jaxmorph.report.terminal import Reporter
from jaxmorph.report.text import describe_regime
from jaxmorph.schedule.timeline import Timeline
from jaxmorph.training.start_lines import StartLines

PICTURE = "planned_and_measured.png"
_MOST_JOINED = 8  # steps for which timelines of other replicas may still arrive


class RunRecord:
    """The record of one run, in the process that the user started.

    A file that can't be written, as on a full disk, is reported once, and the run continues.

    It keeps the latest `trace.keep` traces. Traces around changes stay longer: they are removed
    only while they are more than half of that number.

    Args:
        first_step: The step at which the run begins or resumes; later traces are removed.

    Attributes:
        stopped: Why the run ended early; empty if it didn't.
        start_lines: Shows what starting ranks do, on the terminal; a caller must call `look`.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        reporter: Reporter,
        clock: Callable[[], float] = time.monotonic,
        first_step: int = 0,
    ) -> None:
        self._config = config
        self._directory = directory
        self._reporter = reporter
        self._clock = clock
        self.stopped = ""
        self._history = RunHistory()
        self._traces = _traces_before(first_step, directory)
        self._last_timelines: dict[str, Timeline] = {}  # of replica 0, for the picture
        self._drawn: dict[int, dict[str, Timeline]] = {}  # by step, of all replicas so far
        self._last_traced_step = -1
        self._began_s = self._ranks_began_s = self._last_step_s = clock()
        self._has_started = False
        self._goodput: Goodput | None = None
        self._last_step = first_step - 1
        self._num_reporting = 0
        self._phases = Counter[str]()
        self._unwritten: set[str] = set()
        self.start_lines = StartLines(self.say, clock)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._directory.path

    @property
    def num_recorded(self) -> int:
        """How many steps of the run are recorded, including those before it resumed."""
        return self._last_step + 1

    @property
    def productive_s(self) -> float:
        """The time spent in the recorded steps."""
        return self._history.productive_s

    def take(self, message: RunMessage) -> None:
        """Handle one message."""
        match message:
            case RunStarted():
                self._start(message)
            case StepDone(record):
                self._take_step(record)
            case EventEmitted(event):
                if event.kind == EventKind.STOPPED:
                    self.stopped = event.detail
                self._take_event(event)
            case StepTimelines():
                self._take_timelines(message)
            case ProfileUpdated(profile):
                self._write(self._directory.write_profile, profile)
            case LinksChanged():
                self._write(self._directory.write_links, message)
            case PhaseEnded(phase):
                self._take_phase(phase)

    def starting(self, num_ranks: int, num_reporting: int | None = None) -> None:
        """Say that ranks start; until they train, `take` says what they do.

        Args:
            num_reporting: How many of them report the phases of their start; None: all.
        """
        self._num_reporting = num_ranks if num_reporting is None else num_reporting
        self._phases = Counter()
        self.say(f"starting {num_ranks} rank{'' if num_ranks == 1 else 's'}")
        self.start_lines.begin()

    def say(self, line: str) -> None:
        """Show a line to the user."""
        self._reporter.say(line)

    def write_event(
        self, step: int, kind: EventKind, detail: str, evidence: Json | None = None
    ) -> None:
        """Write an event about ranks that have ended, and so can't send it."""
        time_s = self._clock() - self._ranks_began_s
        event = Event(time_s, step, kind, detail=detail, evidence=evidence)
        self._write(self._directory.write_event, event)
        self._take_event(event)

    def go_back(self, step: int) -> None:
        """Remove the records of `step` and later steps, which will be done again."""
        self._directory.go_back(step)
        self._history.go_back(step)
        self._reporter.go_back(step)
        self._last_step = step - 1
        self._traces = _traces_before(step, self._directory)
        self._drawn = {before: drawn for before, drawn in self._drawn.items() if before < step}
        if self._last_traced_step >= step:  # the picture would show a step that will be done again
            self._last_timelines = {}
        self._last_traced_step = step - 1
        self.write_damage(step)

    def write_damage(self, step: int) -> None:
        """Write what was wrong with the run's files when it went back to `step`."""
        if self._directory.damage:
            self.write_event(step, EventKind.FILES_DAMAGED, self._directory.damage)

    def keep_goodput(self, goodput: Goodput) -> None:
        """Write `recovery.json`, and keep the goodput for the summary."""
        self._goodput = goodput
        self._write(self._directory.write_recovery, goodput.to_json())

    def finish(self) -> None:
        """Draw the last sampled step, and show the summary."""
        picture = None  # a run that was asked to end may have sampled no step
        if self._last_timelines:
            picture = self._directory.path / PICTURE
            try:
                save_timelines(picture, self._last_timelines)
            except UserError as error:  # such as a full disk
                write_stderr(f"error: {error}")
                picture = None
        summary = self._history.summary(
            elapsed_s=self._last_step_s - self._began_s,
            run_directory=self._directory.path,
            picture=picture,
            traces=tuple(self._directory.traces().values()),
            goodput=self._goodput,
        )
        self._reporter.finish(summary)

    def close(self) -> None:
        """Close the files, and release the terminal."""
        self.start_lines.end()
        self._write(self._directory.close)
        self._reporter.close()

    def _write(self, write: Callable[..., None], *values: Any) -> None:
        """Write to the run directory; each file that can't be written is reported once."""
        try:
            write(*values)
        except OSError as error:
            path = str(error.filename or self._directory.path)
            if path not in self._unwritten:
                self._unwritten.add(path)
                why = f"cannot be written: {error.strerror}"
                write_stderr(f"error: {path}: {why}; the run continues")

    def _take_phase(self, phase: str) -> None:
        self._phases[phase] += 1
        if self._phases[phase] != self._num_reporting:  # the slowest rank ends the phase
            return
        if phase == START:
            self.say("compiling")
        elif phase == COMPILE and self._last_step >= 0:
            self.say(f"restoring the checkpoint after {self._last_step + 1} steps")
        elif phase == RESTORE:
            self.say("measuring and planning")

    def _start(self, started: RunStarted) -> None:
        self.start_lines.end()
        self._ranks_began_s = self._clock()
        if self._config.schedule.placement == "auto":
            self._config = self._config.placed(in_a_v=started.schedule == IN_A_V)
            self._write(self._directory.write_config, self._config)
        if not self._has_started:  # after a restart the header is on the screen already
            self._has_started, self._began_s = True, self._ranks_began_s
            self._reporter.start(self._header(started))

    def _take_event(self, event: Event) -> None:
        self._history.add_event(event)
        self._write(self._directory.show_event, event)
        self._reporter.event(event)

    def _header(self, started: RunStarted) -> RunHeader:
        config = self._config
        return RunHeader(
            model=f"{config.model.factory} {config.model.preset}",
            microbatches=config.batch.microbatches,
            microbatch_size=config.batch.microbatch_size,
            sequence_length=config.data.sequence_length,
            num_steps=config.run.steps,
            num_replicas=config.parallelism.data,
            devices_per_stage=config.parallelism.tensor,
            regime=describe_regime(config.emulation),
            run_directory=self._directory.path,
            **vars(started),
        )

    def _take_step(self, record: StepRecord) -> None:
        self._last_step_s, self._last_step = self._clock(), record.step
        self._history.add(record)
        self._write(self._directory.show_step, record)
        self._reporter.step(record)

    def _take_timelines(self, sent: StepTimelines) -> None:
        step, replica = sent.step, f"r{sent.replica} " if sent.replica else ""
        drawn = {
            f"{replica}{name}, step {step}": timeline_of(
                [parse_line(RankTimes, text, "a rank's times") for text in of_ranks],
                self._config.placement.kind,
            )
            for name, of_ranks in sent.timelines.items()
        }
        # Timelines around a change may arrive late.
        if sent.replica == 0 and step >= self._last_traced_step:
            self._last_timelines, self._last_traced_step = drawn, step
        self._drawn[step] = self._drawn.pop(step, {}) | drawn
        self._drawn = dict([*self._drawn.items()][-_MOST_JOINED:])
        self._write(self._write_trace, step, self._drawn[step])
        self._traces[step] = sent.around_change or self._traces.get(step, False)
        while len(self._traces) > self._config.trace.keep:
            dropped = _to_drop(self._traces, self._config.trace.keep)
            del self._traces[dropped]
            self._write(self._remove_trace, dropped)

    def _write_trace(self, step: int, drawn: Mapping[str, Timeline]) -> None:
        text = with_sum(json.dumps(chrome_trace(drawn)))
        self._directory.trace_path(step).write_text(text, encoding="utf-8")

    def _remove_trace(self, step: int) -> None:
        self._directory.trace_path(step).unlink(missing_ok=True)


def _to_drop(traces: Mapping[int, bool], keep: int) -> int:
    """The earliest trace around a change if those are over half of `keep`, else of the others."""
    too_many = 2 * sum(traces.values()) > keep
    return min(step for step, around_change in traces.items() if around_change == too_many)


def _traces_before(step: int, directory: RunDirectory) -> dict[int, bool]:
    """The traces before `step`, unmarked; later ones are removed."""
    traces = directory.traces()
    for number, path in traces.items():
        if number >= step:
            path.unlink(missing_ok=True)
    return {number: False for number in traces if number < step}
