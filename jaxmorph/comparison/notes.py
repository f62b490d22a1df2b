"""The fine print of a comparison: regime, steps, command, versions, machine and load."""

import os
import platform
from importlib import metadata

from jaxmorph.comparison.systems import SYSTEMS
from jaxmorph.config import Config
from jaxmorph.config.compare_section import Compare
from jaxmorph.config.link_sections import Routes
from jaxmorph.reporting import describe_regime
from jaxmorph.reporting.text import describe_trace

_WHOLE = (
    "each system under each condition is a run of {} steps, as `jaxmorph train` makes it, with its "
    "checkpoints; what is emulated of links by steps comes in the same steps for all, but ranks "
    "that were started again meet no cut link: they would use another card"
)


def comparison_notes(config: Config, wanted: Compare, command: str) -> dict[str, str]:
    """What a reader must know to judge and repeat a comparison, by its label."""
    versions = [f"{name} {metadata.version(name)}" for name in ("jaxmorph", "jax", "numpy")]
    emulated = (
        "latency and bandwidth of links are emulated: on direct routes a transfer holds the queues "
        "of both its stages for as long ('holds queues'); on delegated ones messages on their way "
        "overlap and hold nobody up ('overlaps')"
    )
    rounds = f"{wanted.repeats} rounds of {wanted.steps} steps a condition, in turn"
    left_out = f"{wanted.warmup_steps} steps before each are left out"
    noisy = f"noisy: p90 / p10 above {wanted.largest_spread:g}"
    healthy = f"{wanted.profiling_steps} healthy steps" if wanted.profiling_steps else "warm-up"
    profiled = f"planned and predicted from {healthy}"
    predicted = "a prediction ends with the last op: tied gradients and the update come after it"
    systems = (SYSTEMS[name] for name in wanted.systems)
    return {
        "systems": "; ".join(f"{system.name}: {system.meaning}" for system in systems),
        "regime": f"{describe_regime(config.emulation)}; {emulated}",
        "steps": _WHOLE.format(wanted.steps)
        if wanted.has_whole_runs
        else f"{profiled}; {rounds}; {left_out}; {noisy}; {predicted}",
        **_traces(wanted),
        **_left_aside(config),
        "command": f"`{command}`",
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"]),
        "machine": f"{os.cpu_count()} processors, {platform.system()} {platform.machine()}",
        "load at the start": load_averages(),
    }


def _traces(wanted: Compare) -> dict[str, str]:
    """What traces there are, if any, and what they mean for the columns."""
    said = "; ".join(
        f"{condition.name}: {describe_trace(condition.trace)}"
        for condition in wanted.conditions
        if condition.trace is not None
    )
    meaning = (
        "begun anew in each round, the same for all systems; those that adapt are told the recent "
        "delays of each link before every step; a prediction is for the means of the delays that "
        "there were in the last round"
    )
    return {"traces": f"{said}; {meaning}"} if said else {}


def _left_aside(config: Config) -> dict[str, str]:
    """What the configuration says for other commands, if anything."""
    said = {
        "routes": config.routes != Routes(),
        "schedule.link_ms": config.schedule.link_ms is not None,
        "emulation.links": bool(config.emulation.links),
        "emulation.trace": config.emulation.trace is not None,
        "evaluation": config.evaluation.every_steps is not None,
    }
    names = [name for name, is_said in said.items() if is_said]
    reason = "systems have their own routes and plans, conditions their own links; only steps run"
    return {"left aside": f"{', '.join(names)}: {reason}"} if names else {}


def load_averages() -> str:
    """How busy the machine is."""
    return " ".join(f"{load:.2f}" for load in os.getloadavg()) + " (averages of 1, 5, 15 minutes)"
