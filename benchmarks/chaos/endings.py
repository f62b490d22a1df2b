"""Ends runs in every possible manner, and checks that they leave nothing behind."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.watched_run import HungError, WatchedRun

# Two stages with a sidecar each, for more steps than any test waits for.
CONFIG = """
run: {steps: 100000}
model: {preset: tiny, width: 16, num_layers: 2, num_heads: 2}
data: {sequence_length: 8}
parallelism: {stages: 2}
batch: {microbatches: 2, microbatch_size: 1}
schedule: {name: zb-h2}
routes: {default: delegated}
trace: {every_steps: 0}
checkpoint: {every_steps: null}
"""
PATIENCE_S = 60.0
_AFTERWARDS_S = 5.0  # for processes that end by themselves once they see that they are alone


@dataclass(frozen=True)
class Ending:
    """One way for a run to end.

    Attributes:
        codes: The command's exit codes then, of which any will do.
        starting: Whether it is ended before its first step, while its ranks compile.
    """

    name: str
    end: Callable[[WatchedRun], None]
    codes: tuple[int, ...]
    starting: bool = False
    overrides: tuple[str, ...] = ()


def left_by(ending: Ending, folder: Path) -> list[str]:
    """End a run; returns a line for each thing it leaves behind, and each other fault.

    Raises:
        HungError: If it doesn't end.
        EndedError: If it ends before.
    """
    config = folder / "ending.yaml"
    config.write_text(CONFIG)
    with WatchedRun(folder, config, ending.overrides) as run:
        if ending.starting:
            _wait(run, lambda: len(run.sidecars()) == 2, "two sidecars")
        else:
            run.wait_for_step(0, PATIENCE_S)
        run.traces.note()
        ending.end(run)
        code = run.finish(PATIENCE_S)
        wrong = [] if code in ending.codes else [f"expected {ending.codes}: {run.last_output()}"]
        return [*wrong, *run.traces.left_after(_AFTERWARDS_S, run.out)]


def _signals(*numbers: signal.Signals) -> Callable[[WatchedRun], None]:
    """An ending by signals to the command."""

    def end(run: WatchedRun) -> None:
        for number in numbers:
            run.process.send_signal(number)

    return end


def _signals_rank(number: signal.Signals) -> Callable[[WatchedRun], None]:
    return lambda run: os.kill(run.ranks()[1], number)


def _interrupt_twice(run: WatchedRun) -> None:
    """A rank is stuck, as in a driver: the first Ctrl-C waits for it, the second one doesn't."""
    os.kill(run.ranks()[1], signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    _wait(run, lambda: "Ctrl-C: saves" in run.last_output(), "the answer to Ctrl-C")
    run.process.send_signal(signal.SIGINT)


def _kill_rank_of_stopped_sidecar(run: WatchedRun) -> None:
    os.kill(run.sidecars()[1], signal.SIGSTOP)
    _kill_rank(run)


_interrupt, _kill_launcher = _signals(signal.SIGINT), _signals(signal.SIGKILL)
_kill_rank = _signals_rank(signal.SIGKILL)
# A shell that ends signals its jobs, and the terminal that closes does so again.
_hang_up = _signals(signal.SIGHUP, signal.SIGHUP)
_INTERRUPTED, _FAILED, _KILLED = (130,), (1,), (-signal.SIGKILL,)
_TERMINATED = (143,)

ENDINGS = (
    Ending("normal end", _signals(), (0,), overrides=("run.steps=3",)),
    Ending("Ctrl-C", _interrupt, _INTERRUPTED),
    Ending("Ctrl-C twice, a rank stuck", _interrupt_twice, _INTERRUPTED),
    Ending("SIGTERM", _signals(signal.SIGTERM), _TERMINATED),
    Ending("terminal closed", _hang_up, _TERMINATED),
    Ending("SIGTERM to a rank", _signals_rank(signal.SIGTERM), _TERMINATED),
    Ending("rank killed", _kill_rank, _FAILED),
    Ending("rank killed, its sidecar stuck", _kill_rank_of_stopped_sidecar, _FAILED),
    Ending("launcher killed", _kill_launcher, _KILLED),
    Ending("Ctrl-C while ranks compile", _interrupt, _INTERRUPTED, starting=True),
    Ending("rank killed while ranks compile", _kill_rank, _FAILED, starting=True),
    Ending("launcher killed while ranks compile", _kill_launcher, _KILLED, starting=True),
)


def _wait(run: WatchedRun, condition: Callable[[], bool], awaited: str) -> None:
    if not run.reaches(condition, PATIENCE_S, awaited):
        raise HungError(f"waited for {awaited}: {run.last_output()}\n{run.evidence()}")
