"""Records where a result is from, and what else the machine did, so that it can be judged."""

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import jaxmorph
from jaxmorph.config import Config
from jaxmorph.report.run_matrix import Provenance

# Where things are, which systems run, and what they are compared with: none of it changes a step.
_NOT_MEASURED = {
    "run": {"dir"},
    "model": {"folder"},
    "data": {"folder"},
    "adaptation": {"enabled"},  # each system sets it
    "restart_policy": {"compilation_cache"},
    "compare": {"systems", "bars", "reference", "reference_source"},
}
_LENGTHS = "steps", "warmup_steps", "repeats", "profiling_steps"

_STAT, _CPUINFO = Path("/proc/stat"), Path("/proc/cpuinfo")
_IDLE = (3, 4)  # of a line's numbers: idle, and waiting for a disk
_LEAST_S = 1.0  # over which counts in hundredths of a second say something
_COUNTED = 8  # later ones are part of the first two; stolen time, the eighth, disturbs too


def provenance(command: str, configuration: str | None = None) -> Provenance:
    """The provenance of what begins now, in this process."""
    packages = (f"{name} {metadata.version(name)}" for name in ("jax", "numpy"))
    python = f"Python {platform.python_version()}"
    return Provenance(
        command=command,
        commit=_commit(Path(jaxmorph.__file__).parents[1]),
        date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        machine=_machine(),
        versions=", ".join([f"jaxmorph {jaxmorph.__version__}", *packages, python]),
        load_before=load_averages(),
        configuration=configuration,
    )


def _machine() -> str:
    text = _CPUINFO.read_text(encoding="utf-8") if _CPUINFO.exists() else ""
    models = re.findall(r"^model name\s*: (.+)$", text, re.MULTILINE)
    kind = f"{os.cpu_count()} processors, {platform.system()} {platform.machine()}"
    return ", ".join([kind, *models[:1]])


def load_averages() -> tuple[float, ...]:
    """How busy the machine is: load averages of 1, 5 and 15 minutes."""
    return tuple(round(load, 2) for load in os.getloadavg())


@dataclass(frozen=True)
class ProcessorTimes:
    """What processors have done so far, in seconds.

    Load averages can't say what others did: they count this program's ranks too, and lag behind.

    Attributes:
        at_s: When, on a clock that never goes back.
        busy_s: How long the processors that this process may use were busy, all together; None:
            not known, as on macOS.
        own_s: How long this process, and its descendants that have ended, used processors.
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


def configuration_digest(config: Config) -> str:
    """SHA-256 of everything in a configuration that affects what is measured.

    This is how many steps a comparison takes, every other value that differs from its default, and
    the contents of traces. A key that a later version adds changes no digest, nor does a changed
    default: the commit names the sources.

    Raises:
        OSError: A trace can't be read.
    """
    values = config.model_dump(mode="json", exclude_defaults=True, exclude=_NOT_MEASURED)
    values = {key: value for key, value in values.items() if value != {}}
    if config.compare is not None:
        traces = [each.trace for each in config.compare.conditions if each.trace is not None]
        files = {trace.file for trace in traces if trace.file is not None}
        values["contents"] = {name: sha256(Path(name).read_bytes()).hexdigest() for name in files}
        values["lengths"] = [getattr(config.compare, name) for name in _LENGTHS]
    text = json.dumps(values, sort_keys=True)
    return sha256(text.encode()).hexdigest()


def measured_differences(config: Config, other: Config) -> list[str]:
    """The keys in which two configurations differ, among those that the digest covers."""
    now, then = (
        {
            f"{section}.{key}": value
            for section, values in each.model_dump(mode="json", exclude=_NOT_MEASURED).items()
            for key, value in (values if isinstance(values, dict) else {"": values}).items()
        }
        for each in (config, other)
    )
    differ = (key.rstrip(".") for key in now | then if now.get(key) != then.get(key))
    return sorted(differ)


def _commit(root: Path) -> str:
    # A package's folder may lie in somebody else's repository, whose commit says nothing about it.
    if (root / ".git").exists():
        describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
        try:
            done = subprocess.run(describe, capture_output=True, text=True, check=False)
        except OSError:  # there is no git
            return f"jaxmorph {jaxmorph.__version__}"
        if done.returncode == 0:
            return done.stdout.strip()
    return f"jaxmorph {jaxmorph.__version__}"
