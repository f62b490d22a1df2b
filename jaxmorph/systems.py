"""The systems that `jaxmorph compare` runs side by side: how each one plans and sends."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxmorph.config import Config
from jaxmorph.config.sections import Routes
from jaxmorph.schedule.costs import Link
from jaxmorph.schedule.problem_links import pipeline_links

Route = Literal["direct", "delegated"]


@dataclass(frozen=True)
class System:
    """One way to run a pipeline.

    Attributes:
        name: As in the configuration.
        schedule: The schedule's name.
        route: How all links' transfers travel, unless it adapts.
        adapts: Whether it plans anew for a condition, schedule and routes; else it keeps the order
            and the routes that it planned for healthy links.
        meaning: What it stands for.
    """

    name: str
    schedule: str
    route: Route
    adapts: bool
    meaning: str


_TABLE: Sequence[tuple[str, str, Route, bool, str]] = (
    # name            schedule       route        adapts  meaning
    ("gpipe",         "gpipe",       "direct",    False,  "all forwards, then all backwards"),
    ("1f1b",          "1f1b",        "direct",    False,  "one forward, one backward"),
    ("interleaved",   "interleaved", "direct",    False,  "1f1b with two chunks on each stage"),
    ("zb",            "zb-h2",       "direct",    False,  "zero bubbles while links are healthy"),
    ("zb-delegated",  "zb-h2",       "delegated", False,  "zb in the same order, no queue held"),
    ("adaptive",      "adaptive",    "direct",    True,   "planned for the links as they are"),
)  # fmt: skip

SYSTEMS: Mapping[str, System] = {row[0]: System(*row) for row in _TABLE}


def system_config(config: Config, system: System) -> Config:
    """The configuration under which a system runs on healthy links.

    Args:
        config: The comparison's.
        system: The system.

    Returns:
        The same with the system's schedule and routes, and no link emulated or declared: conditions
        of links come and go while it runs, and a system that adapts is told of them. Only such a
        one changes its order inside a step.
    """
    steps = config.compare.total_steps if config.compare else config.run.steps
    warmup_steps = min(config.optimizer.warmup_steps, steps)
    inside = config.adaptation.intra_step if system.adapts else "off"
    chunks = max(2, config.parallelism.chunks) if system.schedule == "interleaved" else 1
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"steps": steps}),
            "optimizer": config.optimizer.model_copy(update={"warmup_steps": warmup_steps}),
            "schedule": config.schedule.model_copy(
                update={"name": system.schedule, "link_ms": None}
            ),
            "parallelism": config.parallelism.model_copy(update={"chunks": chunks}),
            "routes": Routes.model_validate({"default": system.route}),
            "adaptation": config.adaptation.model_copy(update={"intra_step": inside}),
            "emulation": config.emulation.model_copy(update={"links": (), "trace": None}),
        }
    )


def route_choices(config: Config, system: System, slow: Sequence[Link]) -> Iterator[Config]:
    """The routes among which a system chooses, the ones with the fewest delegated links first.

    Args:
        config: What it runs under on healthy links, of `system_config`.
        system: The system.
        slow: The links that are slow.

    Yields:
        For one that adapts: only slow links delegated, and all of them; else what it has.
    """
    if not system.adapts:
        yield config
        return
    cut = config.parallelism
    links = list(pipeline_links(cut.stages, cut.chunks))
    for delegated in (set(slow), set(links)):
        routes = {str(link): "delegated" for link in links if link in delegated}
        if len(routes) == len(links):
            routes = {"default": "delegated"}
        yield config.model_copy(update={"routes": Routes.model_validate(routes)})
