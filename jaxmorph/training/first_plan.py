"""The first plan of a run, and its number of sidecars, from the timings of a few steps."""

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from jaxmorph.config import Config
from jaxmorph.config.link_problems import possible_links
from jaxmorph.control.conditions import (
    UsualLinks,
    outlying_directions,
    usual_delay,
    with_typical_latencies,
)
from jaxmorph.control.link_state import link_of
from jaxmorph.control.offload_planning import with_sampled_copies
from jaxmorph.control.profiler import Profile, Profiler
from jaxmorph.control.rank_times import RankTimes
from jaxmorph.control.step_programs import lower_step, simulate_step
from jaxmorph.control.verdicts import KnownDirection, dead_of, slow_of, with_known_delays
from jaxmorph.errors import UserError
from jaxmorph.program.slots_needed import FIRST_SLOTS, HostRoom
from jaxmorph.records import Link, Route, Routes
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.rendezvous import Rendezvous, agree, gather
from jaxmorph.runtime.report import timings_of
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import StepRunner
from jaxmorph.schedule.costs import LinkDelay, Links, StashBytes
from jaxmorph.schedule.timeline import Timeline
from jaxmorph.training.open_stage import resize_slots
from jaxmorph.training.plan_in_force import (
    PlanInForce,
    agree_on_plan,
    agree_on_stash,
    plan_step,
    unmeasured_profile,
)
from jaxmorph.transport.host import cores_identity, usable_cores
from jaxmorph.transport.several_sidecars import sidecars_needed

_STEPS = 3  # the first connects the links and is not measured
_MICROBATCHES, _ROUNDS = 12, 2  # the fewest in a measured step; a round has one per stage


@dataclass(frozen=True)
class FirstPlan:
    """A plan that is ready to run, and its origin.

    Attributes:
        profiler: Has the measured steps, on rank 0.
        equipped: The resources of delegated links, for the log.
        planned_for: The costs that the plan was made for, on rank 0.
        usual: The delays of links on each measured route, on rank 0: on the configured routes, and
            on delegated ones if the run adapts or may delegate.
        steps: All ranks' times in the measured steps, on rank 0.
        known: The slow and dead directions of an earlier start of the run.
        room: The ranks' host memory for slots and stashes; None: no limit.
    """

    in_force: PlanInForce
    profiler: Profiler
    equipped: str
    planned_for: Profile
    usual: UsualLinks
    steps: tuple[Sequence[RankTimes], ...]
    known: tuple[KnownDirection, ...] = ()
    room: HostRoom | None = None


def plan_by_timings(
    config: Config,
    rendezvous: Rendezvous,
    trainer: StageTrainer,
    inputs: StepInputs,
    num_tied: int,
    known: Sequence[KnownDirection] = (),
    room: HostRoom | None = None,
    *,
    evaluates: bool = False,
    may_delegate: bool = False,
) -> FirstPlan:
    """Measure the costs of ops and links, plan with them, and prepare the ranks for the plan.

    Links that are known to be slow are planned as slow, whatever was measured; they return to their
    direct path like any other link. All ranks call this at the same point.

    Args:
        evaluates: Whether evaluations, which run forwards alone, need slots too.
        may_delegate: Whether later plans may delegate links. A run that adapts always may.

    Raises:
        UserError: The schedule can't keep the configured caps.
    """
    # Dead links are delegated in the measured steps too: a step that waited for a dead path would
    # end the run, or the path would fail once more.
    config = with_delegated(config, sorted(dead_of(known)))
    stash_bytes = agree_on_stash(rendezvous, trainer.stash_memory)
    measured_steps: list[Sequence[RankTimes]] = []
    loads_s: list[float] = []
    measure = partial(
        _measure_steps,
        rendezvous=rendezvous,
        trainer=trainer,
        inputs=inputs,
        num_tied=num_tied,
        stash_bytes=stash_bytes,
        on_step=measured_steps.append,
        on_load=loads_s.append,
        room=room,
    )
    usual: dict[Route, Links] = {}
    if config.adapts or may_delegate:  # the cost of delegation must be known before it is needed
        every = possible_links(config.parallelism.stages)
        on_hosts = measure(with_delegated(config, every), first_step=-2 * _STEPS)
        delegated: dict[Link, Route] = dict.fromkeys(every, "delegated")
        usual["delegated"] = with_known_delays(on_hosts.profile().links, delegated, known)
    profiler = measure(config)
    measured = profiler.profile()
    routes = config.routes.of_links(measured.links)
    usual["direct"] = links = with_known_delays(measured.links, routes, known)
    profile = replace(measured, links=planned_links(config.schedule.link_ms, links))
    delegable = _agree_on_delegable(config, rendezvous, usual, known)
    in_force, profile = agree_on_routes(
        config, rendezvous, profile, usual, delegable, num_tied, room
    )
    if evaluates:
        in_force = in_force.with_slots_to_evaluate()
    in_force = in_force.with_slots_that_fit(room)
    sidecars = agree_on_sidecars(config, rendezvous, trainer, loads_s, measured_steps)
    slots = resize_slots(rendezvous, trainer, in_force.slots)
    deadline = too_short_deadline(config, measured_steps)
    equipped = "; ".join(filter(None, (slots, sidecars, deadline)))
    return FirstPlan(
        in_force,
        profiler,
        equipped,
        profile,
        usual,
        tuple(measured_steps),
        known=tuple(known),
        room=room,
    )


def too_short_deadline(config: Config, steps: Iterable[Sequence[RankTimes]]) -> str:
    """A warning if direct transfers may take longer than their deadline; else "".

    Emulated ops need none: their times are configured, and were checked before the start.
    """
    share = _measured_microbatches(config) / config.microbatches
    compute_s = max(map(busiest_stage_s, steps), default=0.0) / share
    is_known = not config.fails_over or config.longest_backlog_s > 0.0
    if is_known or compute_s <= config.direct_timeout_s:
        return ""
    key = "step_s" if config.timeouts.direct_s is None else "direct_s"
    return (
        f"a direct message may wait for all {compute_s:.3g} s that a stage computes in a step, and "
        f"its link counts as failed after {config.direct_timeout_s:.3g} s: raise timeouts.{key}"
    )


def agree_on_routes(
    config: Config,
    rendezvous: Rendezvous,
    profile: Profile,
    usual: UsualLinks,
    delegable: Iterable[Link],
    num_tied: int,
    room: HostRoom | None = None,
) -> tuple[PlanInForce, Profile]:
    """The plan on the configured routes, or with some links delegated if that is worth it.

    All ranks call this at the same point; `profile` and `usual` are rank 0's.

    Args:
        profile: The costs of ops, and of links on the configured routes.

    Returns:
        The plan, and the costs that it was made for.

    Raises:
        UserError: The schedule can't keep the configured caps.
    """
    plain = agree_on_plan(config, rendezvous, profile, num_tied, room)
    delegated = {link: usual_delay(usual, "delegated", link) for link in delegable}
    if not delegated:
        return plain, profile
    other_profile = replace(profile, links={**profile.links, **delegated})
    other = agree_on_plan(
        with_delegated(config, delegated), rendezvous, other_profile, num_tied, room
    )
    if _is_worth_it(config, rendezvous, plain.simulate(profile), other.simulate(other_profile)):
        return other, other_profile
    return plain, profile


def _agree_on_delegable(
    config: Config,
    rendezvous: Rendezvous,
    usual: Mapping[Route, Links],
    known: Sequence[KnownDirection],
) -> tuple[Link, ...]:
    """The links that a run may delegate from its first step on, by rank 0's measurements.

    A run that adapts may delegate links that are slow already; with `delegates: any`, all links.
    """
    if not config.adapts:
        return ()
    links = usual["direct"]
    directions = outlying_directions(links, config.routes.of_links(links)) | slow_of(known).keys()
    slow = set(map(link_of, directions))
    found = links if config.adaptation.delegates == "any" else slow
    return agree(rendezvous, tuple[Link, ...], tuple(sorted(found)))


def _is_worth_it(config: Config, rendezvous: Rendezvous, plain: Timeline, other: Timeline) -> bool:
    """Whether rank 0 predicts the other step to be shorter by the share `adaptation.worth`."""
    gain_ms = plain.makespan_ms - other.makespan_ms
    is_worth_it = gain_ms > config.adaptation.worth * plain.makespan_ms
    return agree(rendezvous, bool, is_worth_it)


def _measure_steps(
    config: Config,
    rendezvous: Rendezvous,
    trainer: StageTrainer,
    inputs: StepInputs,
    num_tied: int,
    stash_bytes: StashBytes,
    on_step: Callable[[Sequence[RankTimes]], None],
    on_load: Callable[[float], None],
    *,
    room: HostRoom | None = None,
    first_step: int = -_STEPS,
) -> Profiler:
    """Run a few steps, which update nothing, and measure all but the first.

    They run the schedule for equal costs, with fewer microbatches where a step has many.

    Args:
        first_step: The number of the first step; all are negative.
        on_step: Called with each measured step, on rank 0.
        on_load: Called with the processor time of this rank's sidecar for a measured step, if the
            sidecar has answered.

    Returns:
        The profiler of the measured steps, on rank 0.
    """
    profiler = Profiler(config.parallelism.stages, stash_bytes)
    unmeasured = unmeasured_profile(config, stash_bytes)
    microbatches = _measured_microbatches(config) * config.parallelism.data
    batch = config.batch.model_copy(update={"microbatches": microbatches})
    shorter = config.model_copy(update={"batch": batch})
    in_force = agree_on_plan(shorter, rendezvous, unmeasured, num_tied, room)
    if config.offload.enabled:
        in_force = replace(in_force, programs=with_sampled_copies(in_force.programs))
    resize_slots(rendezvous, trainer, in_force.slots)
    trainer.await_registered_slots()  # slower copies until then would make links look slow
    runner = StepRunner(trainer, rendezvous, timeout_s=config.timeouts.step_s)
    before_s: float | None = None
    for step in range(first_step, first_step + _STEPS):
        # The number is negative, so that no message is taken for one of a training step.
        result = runner.run(in_force.program, inputs, step, updates=False)
        if step == first_step:
            before_s = trainer.sidecar_s
        elif rendezvous.rank == 0:
            ranks = timings_of(result.reports)
            profiler.observe(ranks)
            on_step(ranks)
    after_s = trainer.sidecar_s
    if before_s is not None and after_s is not None:
        on_load((after_s - before_s) / (_STEPS - 1))
    return profiler


def _measured_microbatches(config: Config) -> int:
    """The microbatches of a measured step in one replica: whole rounds, as some schedules require.

    They fill whole weight groups too, as W is compiled only for these.
    """
    stages = config.parallelism.stages
    rounds = max(_ROUNDS, math.ceil(_MICROBATCHES / stages))
    unit = math.lcm(stages, config.schedule.weight_group)
    return min(config.microbatches, math.ceil(rounds * stages / unit) * unit)


def with_delegated(config: Config, links: Iterable[Link]) -> Config:
    """The configuration with some links delegated."""
    delegated: dict[str, Route] = {str(link): "delegated" for link in links}
    routes = config.routes.with_links(config.routes.by_link | delegated)
    return config.model_copy(update={"routes": routes})


def settle_garbage() -> None:
    """Exclude the objects of start-up from garbage collection.

    A full collection over the many objects of JAX and Flax takes tens of milliseconds. It would
    interrupt a step, on each rank at a different time.
    """
    gc.collect()
    gc.freeze()


def planned_links(link_ms: Mapping[str, float] | None, measured: Links) -> dict[Link, LinkDelay]:
    """The delays to plan with: as measured, except for links that `schedule.link_ms` names."""
    configured = {
        Link.parse(name): LinkDelay(latency_ms, latency_ms)
        for name, latency_ms in (link_ms or {}).items()
    }
    return {**measured, **configured}


def predicted_step_s(
    config: Config, first: FirstPlan, num_tied: int, delays_ms: Mapping[Link, float]
) -> float:
    """The time of a step in which some links are slower than usual; infinity if it has no plan.

    A run that adapts delegates those links if that makes the step shorter.
    """

    def step_s(config: Config, usual: Links) -> float:
        links = dict(usual)
        for link, delay_ms in delays_ms.items():
            at = usual.get(link, LinkDelay())
            links[link] = LinkDelay(
                at.forward_latency_ms + delay_ms, at.backward_latency_ms + delay_ms
            )
        profile = replace(first.planned_for, links=links)
        try:
            made = plan_step(config, profile, num_tied, first.room)
            programs = lower_step(made.schedule, profile, made.routes, num_tied, made.offloading)
        except UserError:
            return math.inf
        return simulate_step(programs, profile, {}).makespan_ms / 1e3

    def healthy(links: Links, routes: Routes) -> Links:
        return with_typical_latencies(links, outlying_directions(links, routes))

    measured, on_hosts = first.usual["direct"], first.usual.get("delegated", {})
    usual = healthy(measured, config.routes.of_links(measured))
    usual = planned_links(config.schedule.link_ms, usual)
    as_configured_s = step_s(config, usual)
    if not (config.adapts and delays_ms):
        return as_configured_s
    on_hosts = healthy(on_hosts, dict.fromkeys(on_hosts, "delegated"))
    delegated = {link: on_hosts.get(link, LinkDelay()) for link in delays_ms}
    return min(as_configured_s, step_s(with_delegated(config, delegated), {**usual, **delegated}))


# --- Sidecars ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SidecarLoad:
    """The load of one rank's sidecar, and the processor cores for it.

    Attributes:
        step_s: Processor time for a step's messages; 0: none was delegated.
        host: Equal for ranks that share their processor cores.
        cores: The cores that the rank may use, shared with the ranks of the same `host`.
        is_used: Whether the rank has a delegated link.
        compute_s: How long the busiest stage computes in a step, on rank 0; 0 on other ranks.
    """

    step_s: float
    host: str
    cores: float
    is_used: bool
    compute_s: float


def agree_on_sidecars(
    config: Config,
    rendezvous: Rendezvous,
    trainer: StageTrainer,
    loads_s: Sequence[float],
    steps: Sequence[Sequence[RankTimes]],
) -> str:
    """Give each rank the sidecars that it needs; all ranks call this between two steps.

    Args:
        loads_s: The processor time of this rank's sidecar for a step, in each series of measured
            steps.
        steps: All ranks' times in the measured steps, on rank 0.

    Returns:
        The number of sidecars per rank, in words; "" if no rank has a delegated link.
    """
    transport, emulation = config.transport, config.emulation
    # A load can be negative if its sidecar was replaced meanwhile: the new one has used less time.
    own = SidecarLoad(
        max([0.0, *loads_s]),
        cores_identity(),
        usable_cores(),
        trainer.delegated is not None,
        min(map(busiest_stage_s, steps), default=0.0),
    )
    loads = gather(rendezvous, SidecarLoad, own)
    if transport.sidecars == "auto":
        # Each of several would have all of an emulated bandwidth; over RDMA network cards do the
        # work. Each needs a slot of a channel, and `limits.host_gib` may leave only `FIRST_SLOTS`.
        of_links = emulation.links or emulation.hosts or emulation.trace
        emulated = of_links or emulation.message_bytes
        fixed = transport.backend != "tcp" or emulated
        most = FIRST_SLOTS if config.limits.host_gib is not None else None
        count, busy = choose_sidecars(loads, most=1 if fixed else most)
        if count > 1:
            trainer.change_sidecars(rendezvous, count)
    else:
        count, busy = transport.sidecars, 0.0
    if not any(load.is_used for load in loads):
        return ""
    each = "1 sidecar a rank" if count == 1 else f"{count} sidecars a rank"
    return f"{each} (one would be busy for {busy:.0%} of a step)" if busy else each


def choose_sidecars(loads: Sequence[SidecarLoad], most: int | None = None) -> tuple[int, float]:
    """The number of sidecars that the busiest rank needs, and how busy one would be there.

    The latter is a share of a step, 0 if not measured. The number stays within the cores of the
    rank with the fewest. A step lasts at least as long as its busiest stage computes, so that is
    the time in which a sidecar must move a step's messages.
    """
    compute_s = loads[0].compute_s
    busy = max(load.step_s for load in loads) / compute_s if compute_s else 0.0
    sharing = Counter(load.host for load in loads)
    cores = min(load.cores / sharing[load.host] for load in loads) - 1  # the rank itself takes one
    return sidecars_needed(busy, cores if most is None else min(cores, most)), busy


def busiest_stage_s(ranks: Sequence[RankTimes]) -> float:
    """How long the busiest stage computes in a step."""
    return max(each.busy_ms for each in ranks) / 1e3
