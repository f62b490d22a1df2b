"""How busy other processes keep the processors while something is measured.

Load averages can't say: they count this program's ranks too, and lag behind by a minute.
"""

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # of a line's numbers: idle, and waiting for a disk
_LEAST_S = 1.0  # over which counts in hundredths of a second say something
_COUNTED = 8  # those after it are in the first two already; stolen time, the last, disturbs too


@dataclass(frozen=True)
class ProcessorTimes:
    """What processors have done so far, in seconds.

    Attributes:
        at_s: When, on a clock that never goes back.
        busy_s: How long the processors that this process may use were busy, all together; None:
            not known, as on macOS.
        own_s: How long this process used one, and its children that have ended, with theirs.
    """

    at_s: float
    busy_s: float | None
    own_s: float


def processor_times() -> ProcessorTimes:
    """The times until now."""
    busy_s = None
    if _STAT.exists():
        ticks = busy_ticks(_STAT.read_text(encoding="ascii"), os.sched_getaffinity(0))
        busy_s = ticks / os.sysconf("SC_CLK_TCK")
    return ProcessorTimes(time.monotonic(), busy_s, sum(os.times()[:4]))


def busy_ticks(stat: str, processors: Collection[int]) -> int:
    """How long some processors were busy, by the text of `/proc/stat`, in its unit."""
    names = {f"cpu{number}" for number in processors}
    ticks = 0
    for name, *words in map(str.split, stat.splitlines()):
        if name in names:
            ticks += sum(int(word) for at, word in enumerate(words[:_COUNTED]) if at not in _IDLE)
    return ticks


def others_share(before: ProcessorTimes, after: ProcessorTimes, processors: int) -> float | None:
    """The mean share of the processors that other processes kept busy; None: not known.

    Between the two, all children that this process started must have ended.
    """
    elapsed_s = after.at_s - before.at_s
    if before.busy_s is None or after.busy_s is None or elapsed_s < _LEAST_S:
        return None
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, others_s / elapsed_s / processors)
