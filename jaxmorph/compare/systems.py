"""The systems that `jaxmorph compare` runs: how each one plans and sends."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxmorph.config import Config
from jaxmorph.config.link_sections import Routes
from jaxmorph.placement import placement_of
from jaxmorph.records import Link, Route

Memory = Literal["config", "capped", "offload"]
Restarts = Literal["never", "cold", "warm"]
Remaps = Literal["never", "pipeline", "any"]


@dataclass(frozen=True)
class System:
    """One way to run a pipeline.

    Attributes:
        route: The route of all links, unless the system reroutes.
        is_informed: Is given each condition's delays, and plans for them; no other system is.
        reroutes: May delegate single links.
        detects: Gets no delays in advance, and morphs when it detects slow links.
        memory: The cap on stashes: the configuration's (`config`), or one that plans keep
            (`capped`), or one beyond which stashes go to host memory (`offload`).
        sends_take_compute: Delegated messages take compute from their senders, as sends do
            that an accelerator runs beside other kernels.
        restarts: After a rank's failure: `never`, or from the last checkpoint, with compiled
            programs kept (`warm`) or not (`cold`).
        remaps: Where ranks may move a slow pair of hosts that sums gradients.
    """

    name: str
    schedule: str
    route: Route
    meaning: str
    is_informed: bool = False
    reroutes: bool = False
    detects: bool = False
    memory: Memory = "config"
    restarts: Restarts = "never"
    sends_take_compute: bool = False
    remaps: Remaps = "never"


_LISTED = (
    System("gpipe", "gpipe", "direct", "all forwards, then all backwards"),
    System("1f1b", "1f1b", "direct", "one forward, one backward"),
    System("interleaved", "interleaved", "direct", "1f1b with two chunks on each stage"),
    System("zb-v", "zb-v", "direct", "ZB-V: two chunks on each stage, down the stages and back"),
    System("zb", "zb-h2", "direct", "zero bubbles while links are healthy"),
    System("zb-delegated", "zb-h2", "delegated", "zb in the same order, with all links delegated"),
    System(
        "zb-opportunistic", "zb-h2", "delegated",
        "zb-delegated, but each message takes its time on the link out of its sender's compute",
        sends_take_compute=True,
    ),
    System(
        "adaptive", "adaptive", "direct", "detects slow links, and changes its plan and routes",
        reroutes=True, detects=True, remaps="any",
    ),
    System(
        "adaptive-informed", "adaptive", "direct",
        "informed of the links' delays, and planned for them", is_informed=True, reroutes=True,
    ),
    System(
        "adaptive-direct", "adaptive", "direct",
        "informed, with no link delegated", is_informed=True,
    ),
    System(
        "adaptive-capped", "adaptive", "direct",
        "informed, within a cap on device memory",
        is_informed=True, reroutes=True, memory="capped",
    ),
    System(
        "adaptive-offload", "adaptive", "direct",
        "informed, the same cap, stashes beyond it in host memory",
        is_informed=True, reroutes=True, memory="offload",
    ),
    System(
        "falcon", "zb-h2", "direct",
        "zb, but a slow pair of hosts that sums gradients becomes a link between stages",
        remaps="pipeline",
    ),
    System(
        "restart", "1f1b", "direct",
        "1f1b that restarts from its last checkpoint, with compiled programs kept",
        restarts="warm",
    ),
    System(
        "restart-cold", "1f1b", "direct",
        "the same, with everything compiled again", restarts="cold",
    ),
    System("restart-zb", "zb-h2", "direct", "zb that restarts as `restart` does", restarts="warm"),
)  # fmt: skip
SYSTEMS: Mapping[str, System] = {system.name: system for system in _LISTED}


def system_config(config: Config, system: System) -> Config:
    """The configuration of a system on healthy links, with its schedule and routes.

    No link is emulated, since the ranks change the links' conditions while they run. A capped
    system without a configured cap holds at most 2 S - 1 microbatches on each of S stages. A system
    that restarts waits for a transfer as long as the others wait for a direct path.
    """
    steps = config.compare.total_steps if config.compare else config.run.steps
    warmup_steps = min(config.optimizer.warmup_steps, steps)
    stages, chunks = config.parallelism.stages, max(2, config.parallelism.chunks)
    chunks = placement_of(system.schedule, stages, chunks).num_chunks
    offload = {} if system.memory == "config" else {"enabled": system.memory == "offload"}
    failover, timeouts = {}, {}
    if system.restarts != "never":  # it restarts instead, after the same wait
        failover = {"enabled": False}
        timeouts = {"step_s": config.failover_timeout_s}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"steps": steps}),
            "optimizer": config.optimizer.model_copy(update={"warmup_steps": warmup_steps}),
            "schedule": config.schedule.model_copy(
                update={
                    "name": system.schedule,
                    "placement": "default",
                    "link_ms": None,
                    **_cap(config, system),
                }
            ),
            "offload": config.offload.model_copy(update=offload),
            "failover": config.failover.model_copy(update=failover),
            "timeouts": config.timeouts.model_copy(update=timeouts),
            "parallelism": config.parallelism.model_copy(update={"chunks": chunks}),
            "routes": Routes.model_validate({"default": system.route}),
            "adaptation": config.adaptation.model_copy(
                update={"enabled": system.detects, "remaps": system.remaps}
            ),
            "emulation": config.emulation.model_copy(
                update={"links": (), "hosts": (), "trace": None}
            ),
            # Conditions emulate links, whose bandwidth several sidecars would not share.
            "transport": config.transport.model_copy(update={"sidecars": 1}),
        }
    )


def _cap(config: Config, system: System) -> dict[str, int]:
    """The cap of a capped system without a configured cap."""
    if system.memory == "config" or config.schedule.is_capped:
        return {}
    return {"max_live": 2 * config.parallelism.stages - 1}


def route_choices(config: Config, system: System, slow: Sequence[Link]) -> Iterator[Config]:
    """The routes among which a system chooses: slow links delegated, then all links delegated.

    A system that isn't informed, or can't reroute, has only its configured routes.
    """
    if not (system.is_informed and system.reroutes):
        yield config
        return
    links = config.placement.links
    some = [str(link) for link in links if link in slow]
    for routes in (dict.fromkeys(some, "delegated"), {"default": "delegated"}):
        yield config.model_copy(update={"routes": Routes.model_validate(routes)})
