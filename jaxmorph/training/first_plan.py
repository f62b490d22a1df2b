"""The first plan of a run: a few steps for their timings, and what is planned with them."""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from jaxmorph.config import Config
from jaxmorph.config.link_problems import possible_links
from jaxmorph.config.link_sections import Routes
from jaxmorph.control.conditions import UsualLinks, outlying_directions
from jaxmorph.control.offload_planning import with_sampled_copies
from jaxmorph.control.profiler import Profile, Profiler
from jaxmorph.control.verdicts import KnownDirection, dead_of, slow_of, with_known_delays
from jaxmorph.records import Link, Route
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.rendezvous import Rendezvous, agree
from jaxmorph.runtime.report import measured_timeline
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import StepRunner
from jaxmorph.schedule.costs import LinkDelay, Links, StashBytes
from jaxmorph.schedule.timeline import Timeline
from jaxmorph.training.open_stage import make_room
from jaxmorph.training.plan_in_force import (
    PlanInForce,
    agree_on_plan,
    agree_on_stash,
    unmeasured_profile,
)

_WARM_UP_STEPS = 3  # the first of them also connects the links, and doesn't count


@dataclass(frozen=True)
class FirstPlan:
    """A plan that is ready to run, and where it came from.

    Attributes:
        profiler: What was measured for it, on rank 0.
        equipped: What delegated links have got for it, in a few words.
        planned_for: What ops and links cost when it was made, on rank 0.
        usual: What links do on either route, on rank 0; of a run that doesn't adapt on its own.
        timelines: The steps that were measured for it, on rank 0.
        known: The directions of links that weren't well when the run was last at work.
    """

    in_force: PlanInForce
    profiler: Profiler
    equipped: str
    planned_for: Profile
    usual: UsualLinks
    timelines: tuple[Timeline, ...]
    known: tuple[KnownDirection, ...] = ()


def plan_by_timings(
    config: Config,
    rendezvous: Rendezvous,
    trainer: StageTrainer,
    inputs: StepInputs,
    num_tied: int,
    with_slots: Callable[[PlanInForce], PlanInForce],
    known: Sequence[KnownDirection] = (),
) -> FirstPlan:
    """Measure what ops and links cost, plan with that, and make ready for the plan.

    Links that are known to be dead are delegated in every step, in those that measure too: one that
    waited for them would end the run, or give their paths up once more. Links that are known to be
    slow are planned for as if they were so still; they go back as any others do.

    All ranks call this at the same point.

    Args:
        with_slots: Adds the slots that are needed for more than the plan's own steps.
        known: The directions of links that weren't well when the run was last at work, the same on
            all ranks; of a run that adapts.

    Raises:
        UserError: If the schedule can't keep the configured caps.
    """
    config = _delegated(config, sorted(dead_of(known)))
    stash_bytes = agree_on_stash(rendezvous, trainer.stash_memory)
    timelines: list[Timeline] = []
    steps = partial(
        warm_up,
        rendezvous=rendezvous,
        trainer=trainer,
        inputs=inputs,
        num_tied=num_tied,
        stash_bytes=stash_bytes,
        note=timelines.append,
    )
    usual: dict[Route, Links] = {}
    if config.adapts:  # what delegation costs is known before it is needed
        every = possible_links(config.parallelism.stages)
        on_hosts = steps(_delegated(config, every), first_step=-2 * _WARM_UP_STEPS)
        by_hosts: dict[Link, Route] = dict.fromkeys(every, "delegated")
        usual["delegated"] = with_known_delays(on_hosts.profile().links, by_hosts, known)
    profiler = steps(config)
    measured = profiler.profile()
    routes = config.routes.of_links(measured.links)
    usual["direct"] = links = with_known_delays(measured.links, routes, known)
    # Of links that the configuration names planning is told that, in place of what was measured.
    told = replace(measured, links=planned_links(config.schedule.link_ms, links))
    delegable = _agree_on_delegable(config, rendezvous, usual, known)
    in_force, told = agree_on_routes(config, rendezvous, told, usual, delegable, num_tied)
    in_force = with_slots(in_force)
    equipped = make_room(rendezvous, trainer, in_force.slots)
    return FirstPlan(
        in_force, profiler, equipped, told, usual, tuple(timelines), known=tuple(known)
    )


def agree_on_routes(
    config: Config,
    rendezvous: Rendezvous,
    told: Profile,
    usual: UsualLinks,
    delegable: Iterable[Link],
    num_tied: int,
) -> tuple[PlanInForce, Profile]:
    """The plan on the configured routes, or on those with some links delegated if that is worth it.

    All ranks call this at the same point.

    Args:
        told: What ops cost, and links on the configured routes; only rank 0's is read.
        usual: What links do on either route; only rank 0's is read.
        delegable: The links to delegate; without any there is one plan to choose from.

    Returns:
        The plan, and what it was made for.

    Raises:
        UserError: If the schedule can't keep the configured caps.
    """
    plain = agree_on_plan(config, rendezvous, told, num_tied)
    delegated = {link: usual.get("delegated", {}).get(link, LinkDelay()) for link in delegable}
    if not delegated:
        return plain, told
    other_told = replace(told, links={**told.links, **delegated})
    other = agree_on_plan(_delegated(config, delegated), rendezvous, other_told, num_tied)
    if _is_worth_it(config, rendezvous, plain.simulate(told), other.simulate(other_told)):
        return other, other_told
    return plain, told


def _agree_on_delegable(
    config: Config,
    rendezvous: Rendezvous,
    usual: Mapping[Route, Links],
    known: Sequence[KnownDirection],
) -> list[Link]:
    """The links to delegate from the first step on if that is worth it, as rank 0 sees them.

    Of a run that adapts: those that are slow already, or were when it was last at work; or all
    where healthy ones may be delegated.
    """
    if not config.adapts:
        return []
    links = usual["direct"]
    directions = outlying_directions(links, config.routes.of_links(links)) | slow_of(known).keys()
    slow = {Link(min(direction), max(direction)) for direction in directions}
    found = links if config.adaptation.delegates == "any" else slow
    names = tuple(str(link) for link in sorted(found))
    return [Link.parse(name) for name in agree(rendezvous, tuple[str, ...], names)]


def _is_worth_it(config: Config, rendezvous: Rendezvous, plain: Timeline, other: Timeline) -> bool:
    """Whether another step is shorter by what a plan must be worth, as rank 0 predicts them."""
    gain_ms = plain.makespan_ms - other.makespan_ms
    is_worth_it = gain_ms > config.adaptation.worth * plain.makespan_ms
    return agree(rendezvous, bool, is_worth_it)


def warm_up(
    config: Config,
    rendezvous: Rendezvous,
    trainer: StageTrainer,
    inputs: StepInputs,
    num_tied: int,
    stash_bytes: StashBytes,
    *,
    first_step: int = -_WARM_UP_STEPS,
    note: Callable[[Timeline], None] = lambda timeline: None,
) -> Profiler:
    """Run a few steps for their timings alone, in the order that equal costs would give.

    Args:
        inputs: The data of every one of these steps.
        first_step: The number of the first of them, so that none ends after training's first.
        note: Is told of each step that counts, on rank 0.

    Returns:
        What was measured, on rank 0.
    """
    profiler = Profiler(config.parallelism.stages, stash_bytes)
    unmeasured = unmeasured_profile(config, stash_bytes)
    in_force = agree_on_plan(config, rendezvous, unmeasured, num_tied)
    if config.offload.enabled:
        in_force = replace(in_force, programs=with_sampled_copies(in_force.programs))
    make_room(rendezvous, trainer, in_force.slots)
    runner = StepRunner(trainer, rendezvous)
    for step in range(first_step, first_step + _WARM_UP_STEPS):
        # Numbered before training's first step: no message may pass for one of another step.
        result = runner.run(in_force.program, inputs, step, updates=False)
        if step > first_step and rendezvous.rank == 0:
            timeline = measured_timeline(result.reports)
            profiler.observe(timeline)
            note(timeline)
    return profiler


def _delegated(config: Config, links: Iterable[Link]) -> Config:
    """The run with some links delegated, and the others as they are."""
    named = {str(link): "delegated" for link in links}
    routes = {"default": config.routes.default, **config.routes.by_link, **named}
    return config.model_copy(update={"routes": Routes.model_validate(routes)})


def settle_garbage() -> None:
    """Take what start-up made, which stays, out of the garbage collector's rounds.

    A full collection over JAX's and Flax's many objects takes tens of milliseconds, in the middle
    of a step, on every rank at another moment.
    """
    gc.collect()
    gc.freeze()


def planned_links(link_ms: Mapping[str, float] | None, measured: Links) -> dict[Link, LinkDelay]:
    """The links to plan for: as measured, but for those that `schedule.link_ms` names."""
    told = {
        Link.parse(name): LinkDelay(latency_ms, latency_ms)
        for name, latency_ms in (link_ms or {}).items()
    }
    return {**measured, **told}
