"""A direct link between two GPUs whose other end stops, has no memory left, or dies.

Two processes with a device each; on a CPU they rehearse it. What NCCL and XLA do here has not been
seen: these parts print it, and require what a run needs of it. It ends in time, with the stacks of
what stood still in its logs; it names the right rank; and no byte that came is wrong.
"""

import os
import re
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.child import Row
from benchmarks.gpu.stage import is_small
from jaxmorph.copies.backends import PayloadShape
from jaxmorph.errors import RunFailedError
from jaxmorph.program.instructions import Payload, Transfer, channel_of
from jaxmorph.progress import progress
from jaxmorph.records import in_bytes
from jaxmorph.runtime.direct import DirectRoute
from jaxmorph.runtime.join import Joining, join_run
from jaxmorph.runtime.launcher import run_ranks
from jaxmorph.runtime.link_programs import LinkCommunicators
from jaxmorph.runtime.rank_process import LauncherLink, RankArguments, run_rank
from jaxmorph.runtime.routes import TransferIdentity
from jaxmorph.stage.mesh import make_mesh

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
SLACK_S = 10.0
"""How long after `step_s` a run may still be there."""

_STOPS, _NO_MEMORY = "stops", "no-memory"
_MEET_S, _WITHIN_S = 60.0, 70.0
_RUNS_S = 1.0  # until the other end stops, in the middle of whatever it does then
_WHOLE = 3  # transfers before the memory is full
_PATIENT_S = 20.0
_OWN = re.compile(rf"rank 1 failed: \w+: {OUT_OF_MEMORY}")
_STACKS = "most recent call first"
_LARGEST, _LEAST = 1 << 30, 1 << 20
_STEPS, _EVERY, _KILLED_AFTER = 12, 2, 4


@dataclass(frozen=True)
class Sizes:
    """How large messages are, one for which there is no memory, and how long one may take."""

    message_bytes: int
    too_many_bytes: int
    step_s: float


# Below 32 MiB the C library may have memory of its own left.
LARGE, SMALL = Sizes(64 << 20, 256 << 20, 8.0), Sizes(1 << 20, 40 << 20, 3.0)


def _two_devices() -> Generator[Row, None, bool]:
    """Whether there are two GPUs, or none: then two processes on a CPU rehearse."""
    found = len(jax.devices())
    is_gpu = jax.default_backend() != "cpu"
    note = "expected two" if is_gpu else "two processes on the CPU rehearse; times mean nothing"
    yield Row("GPUs", str(found if is_gpu else 0), note, found > 1 if is_gpu else None)
    return found > 1 or not is_gpu


def check_stopped_peer(mode: str, *, small: bool) -> Iterator[Row]:
    """Stop one end (SIGSTOP) in mid-transfer, for ever.

    Args:
        mode: "ends": with the settings that ranks have without failover; "fails-over": those with
            it; "fails-over-tfrt": those, and JAX's other GPU client.
    """
    if not (yield from _two_devices()):
        return
    if mode.endswith("tfrt"):
        os.environ["XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"] = "1"
    sizes = SMALL if is_small(small) else LARGE
    ended = _run(_STOPS, mode, sizes.message_bytes, sizes.step_s)
    yield from ended.rows(sizes.step_s)
    returned = next((each for each in ended.messages if each["kind"] == "returned"), None)
    if returned is not None:
        after = f"an error after {returned['after_s']:.1f} s"
        yield Row("its peer's transfer", after, returned["error"])
        return
    yield Row("its peer's transfer", "never returned", "its watchdog has ended the rank")
    yield Row("stacks in the logs", "yes" if ended.has_stacks else "no", "", ended.has_stacks)


def check_no_memory(*, small: bool) -> Iterator[Row]:
    """Let one end run out of memory in a receive."""
    if not (yield from _two_devices()):
        return
    too_many_bytes = (SMALL if is_small(small) else LARGE).too_many_bytes
    # With failover messages carry sums. XLA on a CPU, which never runs so, then loses the error of
    # an allocation: the receiver's program never ends, in one process without collectives too.
    ended = _run(_NO_MEMORY, "ends", too_many_bytes, _PATIENT_S)
    yield from ended.rows(_PATIENT_S)
    is_own = _OWN.match(ended.reason) is not None
    note = f"expected an error with {OUT_OF_MEMORY}"
    yield Row("raised as", "its own" if is_own else "another's", note, is_own)


@dataclass(frozen=True)
class Ended:
    """How two processes have ended.

    Attributes:
        messages: What they sent.
        reason: Why the run failed, in the launcher's words.
    """

    messages: Sequence[dict[str, Any]]
    reason: str
    ended_s: float
    has_stacks: bool

    def rows(self, step_s: float) -> Iterator[Row]:
        """What holds of any such end."""
        began = next((each for each in self.messages if each["kind"] == "begins"), None)
        if began is None:
            yield Row("transfers before", "0", self.reason, False)
            return
        yield Row("transfers before", str(began["number"]), in_bytes(began["message_bytes"]))
        took_s, most_s = self.ended_s - began["time_s"], step_s + SLACK_S
        note = f"at most {most_s:g} s"
        yield Row("the run ended after", f"{took_s:.1f} s", note, took_s <= most_s)
        yield Row("named", "rank 1", self.reason, self.reason.startswith("rank 1 failed: "))
        wrong = [each["number"] for each in self.messages if each["kind"] == "wrong"]
        note = f"in transfer {wrong[0]}" if wrong else ""
        yield Row("wrong bytes", "some" if wrong else "none", note, not wrong)


def _run(what: str, mode: str, message_bytes: int, step_s: float) -> Ended:
    messages: list[dict[str, Any]] = []
    words, reason = [what, mode, str(message_bytes), str(step_s)], "it did not fail"
    with tempfile.TemporaryDirectory(prefix="jaxmorph-", ignore_cleanup_errors=True) as name:
        try:
            run_ranks(
                "benchmarks.gpu.two_gpus", words, 2, Path(name), messages.append,
                within_s=_WITHIN_S,
            )  # fmt: skip
        except RunFailedError as error:
            reason = str(error).splitlines()[0]
        ended_s = time.monotonic()
        logs = [log.read_text(errors="replace") for log in Path(name).glob("rank_*.log")]
    return Ended(messages, reason, ended_s, any(_STACKS in log for log in logs))


def run_end(arguments: RankArguments, link: LauncherLink, rest: list[str]) -> None:
    """Be one end: rank 1 is the one that stops, or that has no memory.

    Args:
        rest: What it does, the mode, a message's bytes, and how long one may take.
    """
    what, mode, message_bytes, step_s = rest[0], rest[1], int(rest[2]), float(rest[3])
    progress.phase("joins", _MEET_S)
    fails_over = mode != "ends"
    rendezvous = join_run(arguments, Joining(_MEET_S, step_s, fails_over=fails_over))
    end = _End(arguments.rank, link, what, message_bytes, step_s, sealed=fails_over)
    rendezvous.exchange({})
    progress.phase("transfers", step_s)
    end.run()


class _End:
    """One end of a link over which message after message goes, in one direction."""

    def __init__(
        self,
        rank: int,
        link: LauncherLink,
        what: str,
        message_bytes: int,
        step_s: float,
        *,
        sealed: bool,
    ) -> None:
        self._rank, self._link, self._what, self._step_s = rank, link, what, step_s
        # Who stops sends: the other end looks at what has come. Who has no memory receives.
        self._ends = (1, 0) if what == _STOPS else (0, 1)
        words = PayloadShape((message_bytes // 4,), jnp.dtype(jnp.uint32))
        payloads = {channel_of(self._transfer(0)): words}
        mesh = make_mesh(2)
        communicators = LinkCommunicators(mesh, payloads, answered=False, sealed=sealed)
        programs = communicators.first_programs()
        self._route = DirectRoute(programs, answered=False, timeout_s=step_s)
        self._words = np.random.default_rng(0).integers(1 << 32, size=words.shape, dtype=np.uint32)
        self._placed = jax.device_put(self._words, mesh.devices.flat[rank])
        self._number, self._kept = 0, []

    def run(self) -> None:
        """Send or receive until something happens."""
        if self._rank == 1 and self._what == _STOPS:
            threading.Timer(_RUNS_S, self._stop).start()
        for self._number in count():
            if self._rank == 1 and self._what == _NO_MEMORY and self._number >= _WHOLE:
                if self._number == _WHOLE:
                    self._begins()
                # Again and again: what the transfer before has left may be freed only now.
                self._kept += _fill_memory(self._words.nbytes)
            self._move()

    def _move(self) -> None:
        number, began_s = self._number, time.monotonic()
        progress.stamp(f"transfer {number}")
        identity = TransferIdentity(0, 0, self._transfer(number))
        try:
            if self._rank == self._ends[0]:
                value = self._placed ^ np.uint32(number)
                jax.block_until_ready(self._route.post(identity, value, began_s).value)
                return
            moved = self._route.take(identity, began_s, began_s + self._step_s)
            came = np.asarray(moved.checked())
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            after_s = time.monotonic() - began_s
            self._link.send({"kind": "returned", "after_s": after_s, "error": text})
            raise
        if not np.array_equal(came, self._words ^ np.uint32(number)):
            self._link.send({"kind": "wrong", "number": number})

    def _transfer(self, number: int) -> Transfer:
        source, destination = self._ends
        return Transfer(Payload.ACTIVATION, source, destination, number)

    def _stop(self) -> None:
        self._begins()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _begins(self) -> None:
        size, now_s = self._words.nbytes, time.monotonic()
        message = {"number": self._number, "message_bytes": size, "time_s": now_s}
        self._link.send({"kind": "begins", **message})


def _fill_memory(message_bytes: int) -> list[jax.Array]:
    """Leave too little memory for a message; returns what takes it."""
    if jax.default_backend() == "cpu":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + message_bytes // 2
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        return []
    blocks, size = [], _LARGEST
    while size >= _LEAST:
        try:
            blocks.append(jax.block_until_ready(jnp.zeros((size,), jnp.uint8)))
        except jax.errors.JaxRuntimeError:
            size //= 4
    return blocks


_CONFIG = f"""
run: {{steps: {_STEPS}, seed: 5}}
model: {{preset: tiny, width: 64, num_layers: 2, num_heads: 2}}
data: {{sequence_length: 16}}
parallelism: {{stages: 2}}
batch: {{microbatches: 4, microbatch_size: 1}}
schedule: {{name: 1f1b}}
trace: {{every_steps: 0}}
checkpoint: {{every_steps: {_EVERY}}}
restart_policy: {{backoff_s: 0.1}}
timeouts: {{step_s: 20}}
"""


def check_restart(*, small: bool) -> Iterator[Row]:
    """Kill one rank of `jaxmorph train` in mid-step; it goes on to the bits of a quiet run."""
    from benchmarks.chaos.watched_run import WatchedRun

    del small
    if not (yield from _two_devices()):
        return
    # Else two runs on a GPU agree only to rounding.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
    os.environ["XLA_FLAGS"] = flags.strip()
    losses, events = [], []
    with tempfile.TemporaryDirectory(prefix="jaxmorph-", ignore_cleanup_errors=True) as name:
        config = Path(name) / "two_gpus.yaml"
        config.write_text(_CONFIG)
        for kills in (False, True):
            with WatchedRun(Path(name) / f"kills_{kills}", config) as run:
                if kills:
                    run.wait_for_step(_KILLED_AFTER, 60.0)
                    os.kill(run.ranks()[1], signal.SIGKILL)
                code = run.finish(90.0)
                note = "" if code == 0 else run.last_output()
                words = "killed once" if kills else "quiet"
                yield Row(f"{words}: exit code", str(code), note, code == 0)
                losses.append([(step.step, step.loss, step.grad_norm) for step in run.steps()])
                events = [event.kind for event in run.events()]
    restarts = events.count("restarted")
    yield Row("restarts", str(restarts), "expected 1", restarts == 1)
    same = losses[0] == losses[1] and len(losses[0]) == _STEPS
    yield Row("losses and norms", "the same bits" if same else "others", "", same)


if __name__ == "__main__":
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    run_rank(run_end)
