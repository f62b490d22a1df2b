"""The fine print of a comparison: regime, steps, command, versions, machine and load."""

import os
import platform
from importlib import metadata

from jaxmorph.config import Config
from jaxmorph.config.compare_section import Compare
from jaxmorph.reporting import describe_regime
from jaxmorph.systems import SYSTEMS


def comparison_notes(config: Config, wanted: Compare, command: str) -> dict[str, str]:
    """What a reader must know to judge and repeat a comparison, by its label.

    Args:
        config: The comparison's configuration.
        wanted: What is compared.
        command: What the user typed.
    """
    versions = [f"{name} {metadata.version(name)}" for name in ("jaxmorph", "jax", "numpy")]
    emulated = (
        "latency and bandwidth of links are emulated: on direct routes a transfer holds the queues "
        "of both its stages for as long ('holds queues'); on delegated ones messages on their way "
        "overlap and hold nobody up ('overlaps')"
    )
    rounds = f"{wanted.repeats} rounds of {wanted.steps} steps a condition, in turn"
    left_out = f"{wanted.warmup_steps} steps before each are left out"
    noisy = f"noisy: p90 / p10 above {wanted.largest_spread:g}"
    profiled = f"planned and predicted from {wanted.profiling_steps} healthy steps"
    systems = (SYSTEMS[name] for name in wanted.systems)
    return {
        "systems": "; ".join(f"{system.name}: {system.meaning}" for system in systems),
        "regime": f"{describe_regime(config.emulation)}; {emulated}",
        "steps": f"{profiled}; {rounds}; {left_out}; {noisy}",
        "command": f"`{command}`",
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"]),
        "machine": f"{os.cpu_count()} processors, {platform.system()} {platform.machine()}",
        "load at the start": load_averages(),
    }


def load_averages() -> str:
    """How busy the machine is."""
    return " ".join(f"{load:.2f}" for load in os.getloadavg()) + " (averages of 1, 5, 15 minutes)"
