"""The part on time-outs: what who waits does for a message that never comes."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import jax

from jaxmorph.gpu_check.child_process import Told, ask
from jaxmorph.gpu_check.kernel_wait import KernelWait
from jaxmorph.gpu_check.lone_end import CHANNEL
from jaxmorph.gpu_check.report import Row
from jaxmorph.gpu_check.settings import CheckSettings
from jaxmorph.transport.plane import ChannelSpec, IncomingEnd

_DEADLINE_MS = 50.0
_LATER_MS = 1000.0
"""Later than that a wait has not ended as it should, however busy the machine is."""


@dataclass(frozen=True)
class WaitsReport:
    """How waits for what never comes end.

    Attributes:
        host_waited_ms: Until `take` raised, of a message that had to come in 50 ms; None if it
            raised nothing, or something else.
        kernel: What a kernel does; None where there is none, or it told nothing.
        trouble: Why it told nothing; empty where there is none.
    """

    host_waited_ms: float | None
    kernel: KernelWait | None = None
    trouble: str = ""

    def rows(self) -> Iterator[Row]:
        """A row for each."""
        waited = self.host_waited_ms
        told = "didn't end so" if waited is None else f"{waited:.1f} ms"
        in_time = waited is not None and _DEADLINE_MS <= waited < _DEADLINE_MS + _LATER_MS
        yield Row("the host gave up after", told, f"of {_DEADLINE_MS:g} ms that it had", in_time)
        if self.kernel is not None:
            yield from _kernel_rows(self.kernel)
        elif self.trouble:
            yield Row("copy_from_host", "doesn't work", self.trouble, False)
        else:
            yield Row("copy_from_host", "absent", "the kernel needs a GPU")


def _kernel_rows(found: KernelWait) -> Iterator[Row]:
    spin_us, waited_us = found.spin_us, found.waited_us
    in_time = spin_us <= waited_us < spin_us + 1e3 * _LATER_MS
    note = f"of {spin_us} us that it had, and said so" if found.said_so else "and didn't say so"
    yield Row(
        "copy_from_host gave up after", f"{waited_us:.0f} us", note, in_time and found.said_so
    )
    whole = "whole" if found.then_whole else "not whole"
    yield Row("the same call once signalled", whole, "", found.then_whole)


def measure_waits(settings: CheckSettings) -> WaitsReport:
    """Wait for messages that don't come: on the host, and in a kernel.

    Args:
        settings: How long a kernel waits, and for how long its process may run.
    """
    host_waited_ms = wait_on_host()
    if jax.devices()[0].platform == "cpu":
        return WaitsReport(host_waited_ms)
    limit_s = min(settings.copies.child_s, settings.left_s)
    words = [f"--spin-us={settings.copies.spin_us}", f"--limit-s={limit_s}"]
    command = [sys.executable, "-m", "jaxmorph.gpu_check.kernel_wait", *words]
    return with_kernel(host_waited_ms, partial(ask, command, limit_s))


def wait_on_host() -> float | None:
    """Milliseconds until a wait for a message that never comes ends by its deadline."""
    with closing(IncomingEnd(ChannelSpec(CHANNEL, 4, 1), 0, lambda: None)) as end:
        began_s = time.monotonic()
        try:
            end.take(began_s + _DEADLINE_MS / 1e3)
        except TimeoutError:
            return 1e3 * (time.monotonic() - began_s)
    return None


def with_kernel(host_waited_ms: float | None, ask_kernel: Callable[[], Told]) -> WaitsReport:
    """What the process says that has a kernel wait."""
    told = ask_kernel()
    if told.trouble or not told.lines:
        return WaitsReport(host_waited_ms, trouble=told.trouble or "its process told nothing")
    return WaitsReport(host_waited_ms, KernelWait(**told.lines[-1]))
