"""A run of `jaxmorph train` under observation, which is ended when it hangs. Linux only."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.chaos.hanging_rank import FOLDER
from benchmarks.leftovers import Traces, children, command, state
from jaxmorph.records import Event, StepRecord
from jaxmorph.report.run_directory import EVENTS, METRICS, read_records

ROOT = Path(__file__).parent.parent.parent
START_S = 240.0
_POLL_S = 0.02
_SIDECAR, _PLANNING = "jaxmorph.transport.sidecar", "jaxmorph.training.planning_process"


class HungError(RuntimeError):
    """A run made no progress in time; the message has the evidence."""


class EndedError(RuntimeError):
    """A run that ended too early; the message has its exit code and the end of its output."""


class WatchedRun:
    """One run, from its start; all that it has started ends with the `with` statement.

    Args:
        folder: Where its output goes, and temporary files; it has nothing in it.
        config: Its configuration.
        overrides: Changes to that.
        out: The run's directory; None: one in `folder`.
        module: The command, as for `python -m`.

    Attributes:
        folder: As given.
        out: The run's directory.
        traces: What it holds on the machine.
        process: The command.
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
        self._said = folder / "said.txt"
        words = [module, "train", str(config), f"run.dir={self.out}"]
        self._command = [sys.executable, "-m", *words, *overrides]
        self.start()

    def start(self, *words: str) -> None:
        """Start the command, with more words; an earlier one must have ended."""
        with self._said.open("ab") as said, _accepting_ctrl_c():
            self.process = subprocess.Popen(
                [*self._command, *words],
                cwd=ROOT,
                env={**self.traces.environment(), FOLDER: str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=said,
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
        return self._children(_SIDECAR)

    def planning(self) -> dict[int, int]:
        """The planning process of rank 0, if it has one now."""
        return self._children(_PLANNING)

    def _children(self, module: str) -> dict[int, int]:
        return {
            rank: child
            for rank, pid in self.ranks().items()
            for child in children(pid)
            if module in command(child) and state(child) not in ("", "Z")
        }

    def texts(self) -> dict[str, str]:
        """Its output and its logs, by their files."""
        paths = [self._said, *sorted((self.out / "logs").rglob("*.log"))]
        return {str(path): path.read_text(errors="replace") for path in paths if path.exists()}

    def steps(self) -> list[StepRecord]:
        """The steps that it has written down."""
        return read_records(self.out / METRICS, StepRecord)

    def events(self) -> list[Event]:
        """The events that it has written down."""
        return read_records(self.out / EVENTS, Event)

    def last_step(self) -> int:
        """The number of the last step that it has written down; -1 before the first."""
        return max((record.step for record in self.steps()[-1:]), default=-1)

    def wait_for_step(self, step: int, patience_s: float) -> None:
        """Return once a step has been written down.

        Args:
            step: Its number.
            patience_s: How long it may take from one step to the next.

        Raises:
            HungError: If it takes longer.
            EndedError: If the run ends before.
        """
        seen, given_s = self.last_step(), self._given_s(patience_s)
        until_s = time.monotonic() + given_s
        while seen < step:
            if self.process.poll() is not None:
                raise EndedError(f"ended before step {step}: {self.last_output()}")
            if (now := self.last_step()) != seen:
                seen, given_s, until_s = now, patience_s, time.monotonic() + patience_s
            if time.monotonic() > until_s:
                raise HungError(f"no step after {seen} for {given_s:g} s\n{self.evidence()}")
            time.sleep(_POLL_S)

    def finish(self, patience_s: float) -> int:
        """Its exit code, once it has ended.

        Args:
            patience_s: How long that may take.

        Raises:
            HungError: If it takes longer.
        """
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired as error:
            raise HungError(f"not over after {patience_s:g} s\n{self.evidence()}") from error

    def last_output(self) -> str:
        """Its exit code, if it has ended, and the end of its output."""
        said = self._said.read_text(errors="replace").splitlines()[-12:]
        return "\n".join([f"exit code {self.process.poll()}", *said])

    def evidence(self) -> str:
        """The calls that its processes wait in, and the ends of their logs."""
        lines = [_waiting(pid) for pid in self.traces.processes()]
        for path in [self._said, *sorted((self.out / "logs").rglob("*.log")), self.out / EVENTS]:
            if path.exists():
                lines += [f"{path}:", *path.read_text(errors="replace").splitlines()[-8:]]
        return "\n".join(lines)

    def _given_s(self, patience_s: float) -> float:
        """Before the first step it compiles."""
        return patience_s if self.last_step() >= 0 else max(START_S, patience_s)


class Heard:
    """What a run says from now on: its events, and the lines of its logs and its output."""

    def __init__(self, run: WatchedRun) -> None:
        self._run, self._texts = run, run.texts()
        self._events = set(map(repr, run.events()))

    def says(self, pattern: str) -> bool:
        """Whether an event (`kind: detail`) or a line has something that matches the pattern."""
        return any(re.search(pattern, line) for line in self._lines())

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
