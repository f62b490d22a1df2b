"""A run of `jaxmorph train` under observation, which is ended when it hangs. Linux only."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.chaos.hanging_rank import FOLDER
from benchmarks.leftovers import Traces, children, command, state
from benchmarks.results import ROOT
from jaxmorph.records import Event, EventKind, StepRecord
from jaxmorph.report.run_directory import EVENTS, METRICS, read_records

START_S = 240.0
_POLL_S = 0.02


class HungError(RuntimeError):
    """A run made no progress in time; the message has the evidence."""


class EndedError(RuntimeError):
    """A run that ended too early; the message has its exit code and the end of its output."""


class WatchedRun:
    """One run, from its start; all that it has started ends with the `with` statement.

    Args:
        folder: Where its output goes, and temporary files; it has nothing in it.
        out: The run's directory; None: one in `folder`.
        module: The command, as for `python -m`.
    """

    def __init__(
        self,
        folder: Path,
        config: Path,
        overrides: Sequence[str] = (),
        out: Path | None = None,
        module: str = "jaxmorph",
    ) -> None:
        self.folder, self.out = folder, out or folder / "out"
        temporary = folder / "tmp"
        temporary.mkdir(parents=True)
        self.traces = Traces(temporary)
        self._output = folder / "output.txt"
        words = [module, "train", str(config), f"run.dir={self.out}"]
        self._command = [sys.executable, "-m", *words, *overrides]
        self.start()

    def start(self, *words: str) -> None:
        """Start the command, with more words; an earlier one must have ended."""
        with self._output.open("ab") as output, _accepting_ctrl_c():
            self.process = subprocess.Popen(
                [*self._command, *words],
                cwd=ROOT,
                env={**self.traces.environment(), FOLDER: str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> "WatchedRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.traces.kill()
        self.process.wait()

    def ranks(self) -> dict[int, int]:
        """The process of each living rank, by the rank."""
        found = {}
        for pid in children(self.process.pid):
            words = command(pid)
            if state(pid) not in ("", "Z"):
                found |= {int(word[7:]): pid for word in words if word.startswith("--rank=")}
        return found

    def sidecars(self) -> dict[int, int]:
        """The sidecar of each rank that has one now."""
        return self._children("jaxmorph.transport.sidecar")

    def planning(self) -> dict[int, int]:
        """The planning process of rank 0, if it has one now."""
        return self._children("jaxmorph.training.planning_process")

    def _children(self, module: str) -> dict[int, int]:
        return {
            rank: child
            for rank, pid in self.ranks().items()
            for child in children(pid)
            if module in command(child) and state(child) not in ("", "Z")
        }

    def texts(self) -> dict[Path, str]:
        """Its output and its logs, by their files."""
        paths = [self._output, *sorted((self.out / "logs").rglob("*.log"))]
        return {path: path.read_text(errors="replace") for path in paths if path.exists()}

    def steps(self) -> list[StepRecord]:
        """The steps that it has recorded."""
        return read_records(self.out / METRICS, StepRecord)

    def events(self) -> list[Event]:
        """The events that it has recorded."""
        return read_records(self.out / EVENTS, Event)

    def has_checkpoint(self) -> bool:
        """Whether it has recorded that it saved one."""
        return any(event.kind == EventKind.CHECKPOINT_SAVED for event in self.events())

    def last_step(self) -> int:
        """The number of the last step that it has recorded; -1 before the first."""
        return max((record.step for record in self.steps()[-1:]), default=-1)

    def wait_for_step(self, step: int, patience_s: float) -> None:
        """Return once a step has been recorded.

        Args:
            patience_s: How long it may take from one step to the next; the first one, before which
                it compiles, may take longer.

        Raises:
            HungError: If it takes longer.
            EndedError: If the run ends before.
        """
        while (seen := self.last_step()) < step:
            given_s = patience_s if seen >= 0 else max(START_S, patience_s)
            if not self.reaches(
                lambda seen=seen: self.last_step() != seen, given_s, f"step {step}"
            ):
                raise HungError(f"no step after {seen} for {given_s:g} s\n{self.evidence()}")

    def reaches(self, condition: Callable[[], bool], within_s: float, awaited: str) -> bool:
        """Whether a condition comes true in time.

        Raises:
            EndedError: The run fails or ends before.
        """
        until_s = time.monotonic() + within_s
        while not condition():
            if self.process.poll() is not None:
                if condition():  # it came with the end
                    return True
                raise EndedError(f"ended before {awaited}: {self.last_output()}")
            if time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        return True

    def wait_for_end(self, num_steps: int, patience_s: float) -> None:
        """Return once it has done its last step and ended well.

        Raises:
            HungError: A step, or its end, takes longer.
            EndedError: It fails.
        """
        self.wait_for_step(num_steps - 1, patience_s)
        if self.finish(patience_s) != 0:
            raise EndedError(self.last_output())

    def finish(self, patience_s: float) -> int:
        """Its exit code, once it has ended.

        Raises:
            HungError: If that takes longer.
        """
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired as error:
            raise HungError(f"not over after {patience_s:g} s\n{self.evidence()}") from error

    def last_output(self) -> str:
        """Its exit code, if it has ended, and the end of its output."""
        lines = self._output.read_text(errors="replace").splitlines()[-12:]
        return "\n".join([f"exit code {self.process.poll()}", *lines])

    def evidence(self) -> str:
        """The calls that its processes wait in, and the ends of their logs."""
        texts = {**self.texts(), self.out / EVENTS: "\n".join(map(str, self.events()))}
        lines = [_waiting(pid) for pid in self.traces.processes()]
        for path, text in texts.items():
            lines += [f"{path}:", *text.splitlines()[-8:]]
        return "\n".join(lines)


class NewOutput:
    """What a run has recorded, logged and printed since this was made."""

    def __init__(self, run: WatchedRun) -> None:
        self._run, self._texts = run, run.texts()
        self._events = set(map(repr, run.events()))

    def matches(self, pattern: str) -> bool:
        """Whether the pattern is found in an event (`kind: detail`) or in a line."""
        return any(re.search(pattern, line) for line in self._lines())

    def matches_within(self, seconds: float, pattern: str) -> bool:
        """The same, but it may take so long.

        Raises:
            EndedError: The run has failed.
        """
        try:
            return self._run.reaches(lambda: self.matches(pattern), seconds, f"{pattern!r}")
        except EndedError:
            if self._run.process.poll() == 0:  # it has done all its steps
                return False
            raise

    def _lines(self) -> Iterator[str]:
        for event in self._run.events():
            if repr(event) not in self._events:
                yield f"{event.kind}: {event.detail}"
        for path, text in self._run.texts().items():
            before = self._texts.get(path, "")
            yield from text[len(before) if text.startswith(before) else 0 :].splitlines()


@contextmanager
def _accepting_ctrl_c() -> Iterator[None]:
    """Accept Ctrl-C: a shell's background job ignores it, and its processes would inherit that."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if before is signal.SIG_IGN:
            signal.signal(signal.SIGINT, before)


def _waiting(pid: int) -> str:
    threads = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        try:
            threads.append((task / "wchan").read_text() or "running")
        except OSError:
            continue
    return f"{pid} ({state(pid)}) {' '.join(command(pid)[:6])}: threads in {', '.join(threads)}"
