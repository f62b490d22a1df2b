"""Records where a result is from, so that it can be judged and repeated."""

import json
import os
import platform
import subprocess
import time
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
    "compare": {"systems", "bars", "reference", "reference_source"},
}
_LENGTHS = "steps", "warmup_steps", "repeats", "profiling_steps"


def provenance(command: str, configuration: str | None = None) -> Provenance:
    """The provenance of what begins now, in this process."""
    packages = (f"{name} {metadata.version(name)}" for name in ("jax", "numpy"))
    python = f"Python {platform.python_version()}"
    return Provenance(
        command=command,
        commit=_commit(Path(jaxmorph.__file__).parents[1]),
        date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        machine=f"{os.cpu_count()} processors, {platform.system()} {platform.machine()}",
        versions=", ".join([f"jaxmorph {jaxmorph.__version__}", *packages, python]),
        load_before=load_averages(),
        configuration=configuration,
    )


def load_averages() -> tuple[float, ...]:
    """How busy the machine is: load averages of 1, 5 and 15 minutes."""
    return tuple(round(load, 2) for load in os.getloadavg())


def configuration_digest(config: Config) -> str:
    """SHA-256 of all in a configuration that matters to what is measured.

    That is how many steps a comparison takes, every other value that differs from its default, and
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
    """The keys in which two configurations differ, of those that the digest is of."""
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
    # A package's folder may lie in somebody else's repository, whose commit says nothing of it.
    if (root / ".git").exists():
        describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
        try:
            done = subprocess.run(describe, capture_output=True, text=True, check=False)
        except OSError:  # there is no git
            return f"jaxmorph {jaxmorph.__version__}"
        if done.returncode == 0:
            return done.stdout.strip()
    return f"jaxmorph {jaxmorph.__version__}"
