"""Pipeline-parallel training in JAX that stays fast when links turn slow or fail.

These names are the public API: see `docs/how-to/library.md`. Each is imported on first use, so
planning works without JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmorph.config import Config, load_config
    from jaxmorph.errors import RunFailedError, UserError
    from jaxmorph.records import Link
    from jaxmorph.runtime.optimizer import is_matrix
    from jaxmorph.schedule.costs import Limits, LinkDelay, StageCosts, chain_links
    from jaxmorph.schedule.planner import Plan, plan
    from jaxmorph.schedule.schedule import Schedule
    from jaxmorph.schedule.simulate import simulate
    from jaxmorph.schedule.timeline import Timeline
    from jaxmorph.training.script import join
    from jaxmorph.training.trainer import StepMetrics, Trainer

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Limits",
    "Link",
    "LinkDelay",
    "Plan",
    "RunFailedError",
    "Schedule",
    "StageCosts",
    "StepMetrics",
    "Timeline",
    "Trainer",
    "UserError",
    "chain_links",
    "is_matrix",
    "join",
    "load_config",
    "plan",
    "simulate",
]

_HOMES = {
    "Config": "config",
    "Limits": "schedule.costs",
    "Link": "records",
    "LinkDelay": "schedule.costs",
    "Plan": "schedule.planner",
    "RunFailedError": "errors",
    "Schedule": "schedule.schedule",
    "StageCosts": "schedule.costs",
    "StepMetrics": "training.trainer",
    "Timeline": "schedule.timeline",
    "Trainer": "training.trainer",
    "UserError": "errors",
    "chain_links": "schedule.costs",
    "is_matrix": "runtime.optimizer",
    "join": "training.script",
    "load_config": "config",
    "plan": "schedule.planner",
    "simulate": "schedule.simulate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
