"""One rank of one system of a comparison, for one block: `python -m jaxmorph.compare.rank`."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from jaxmorph.compare.blocks import RoundPlanned
from jaxmorph.compare.condition_links import link_conditions
from jaxmorph.compare.condition_plans import ConditionPlanner
from jaxmorph.compare.condition_steps import ConditionRunner
from jaxmorph.compare.rounds import RoundPaths, Rounds
from jaxmorph.compare.systems import SYSTEMS, system_config
from jaxmorph.config import load_config
from jaxmorph.config.link_problems import possible_links
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.rank_times import around_ops_ms
from jaxmorph.data import read_ahead
from jaxmorph.emulation.link_settings import hardware_conditions
from jaxmorph.errors import UserError
from jaxmorph.plain_json import tagged
from jaxmorph.records import Link, Route
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.join import Joining, join_run
from jaxmorph.runtime.kept_programs import keep_compiled
from jaxmorph.runtime.rank_process import LauncherLink, RankArguments, run_rank
from jaxmorph.runtime.report import timings_of
from jaxmorph.schedule.costs import Links
from jaxmorph.stage.model import device_choices
from jaxmorph.training.device_memory import with_device_budget
from jaxmorph.training.first_plan import FirstPlan, plan_by_timings, settle_garbage
from jaxmorph.training.host_memory import agree_on_host_room
from jaxmorph.training.layer_choice import choose_layers, measured_on_rank_0
from jaxmorph.training.open_stage import open_stage, stage_settings
from jaxmorph.training.plan_in_force import PlanInForce
from jaxmorph.training.run_parts import (
    check_together,
    load_parts,
    require_same_data,
    step_reader,
)


def _profiled(
    first: FirstPlan, runner: ConditionRunner, num_steps: int, rank: int
) -> tuple[FirstPlan, float]:
    """Run some steps on healthy links, and add their measurements to the first plan's.

    Returns:
        The plan, and what the steps took besides their ops, in milliseconds; both on rank 0.
    """
    steps = runner.run(first.in_force, (), num_steps).steps
    if rank != 0 or not steps:
        return first, 0.0
    measured = [timings_of(step.reports) for step in steps]
    for ranks in measured:
        first.profiler.observe(ranks)
    profile = first.profiler.profile()
    around_ms = median(map(around_ops_ms, measured, (step.step_s for step in steps)))
    first = replace(
        first,
        planned_for=profile,
        usual=with_measured(first.usual, profile.links, first.in_force.plan.routes),
        steps=(*first.steps, *measured),
    )
    return first, around_ms


def with_measured(usual: UsualLinks, measured: Links, routes: Mapping[Link, Route]) -> UsualLinks:
    """Replace the usual delay of each measured link on its own route.

    Args:
        measured: The new delays.
        routes: The links' routes; a missing link is direct.
    """
    return {
        route: {
            **links,
            **{link: at for link, at in measured.items() if routes.get(link, "direct") == route},
        }
        for route, links in usual.items()
    }


def _run_rank(arguments: RankArguments, link: LauncherLink, rest: list[str]) -> None:
    """Run one block of one system under every condition."""
    path, system, block = Path(rest[0]), SYSTEMS[rest[1]], int(rest[2])
    config = load_config(path)
    if config.compare is None:
        raise ValueError(f"{path}: no section compare")
    wanted, healthy = config.compare, system_config(config, system)
    rendezvous = join_run(arguments, Joining.of(healthy))
    rank = rendezvous.rank
    parts = load_parts(healthy)
    require_same_data(healthy, rendezvous, parts.data)
    if parts.shapes.shorter:
        raise UserError(
            f"data.factory: {config.data.factory}: got steps of several lengths, expected one: a "
            "comparison compares steps that compute the same"
        )
    sizes = healthy.batch.microbatch_size, healthy.data.sequence_length
    device_choices(parts.model, *sizes, parts.shapes.extras)
    check_together(healthy, rendezvous, parts.model, parts.shapes, parts.microbatch)
    measure = partial(measured_on_rank_0, healthy, parts.model, parts.microbatch)
    cut = choose_layers(healthy, rendezvous, parts.model.num_layers, measure)
    settings = stage_settings(
        healthy, cut.layers, rank, adapts=system.reroutes, shapes=parts.shapes
    )
    if system.sends_take_compute and settings.pace is not None:  # the schema requires a pace
        settings = replace(settings, pace=replace(settings.pace, sends_take_compute=True))
    hardware = hardware_conditions(healthy.emulation, healthy.parallelism.stages)
    links, num_tied = EmulatedLinks(hardware), len(parts.model.tied)
    with (
        keep_compiled(config, path.parent, rank) as programs_ran,
        open_stage(healthy, rendezvous, parts.model, settings, links) as trainer,
        read_ahead(read := step_reader(healthy, parts.batches, rank, trainer)) as inputs,
    ):
        healthy = with_device_budget(healthy, rendezvous, trainer).for_first_plan
        links.emulate(())
        payloads = settings.payloads(parts.model)
        room = agree_on_host_room(healthy, rendezvous, trainer, payloads, settings.delegated)
        first = plan_by_timings(
            healthy,
            rendezvous,
            trainer,
            read(0),
            num_tied,
            room=room,
            may_delegate=system.reroutes,
        )
        settle_garbage()
        rendezvous.limit(config.timeouts.step_s)
        runner = ConditionRunner(rendezvous, trainer, links, inputs, healthy.optimizer.clip_norm)
        first, around_ms = _profiled(first, runner, wanted.profiling_steps, rank)
        programs_ran()
        message_bytes = config.emulation.message_bytes or settings.message_bytes(parts.model)
        planner = ConditionPlanner(
            healthy,
            system,
            rendezvous,
            first.planned_for,
            num_tied,
            message_bytes,
            room,
            measured_on=first.in_force.plan.routes,
            usual=first.usual,
            around_ops_ms=around_ms,
        )
        plans: list[PlanInForce] = []
        for index, condition in enumerate(wanted.conditions):
            in_force, planned = planner.begin(first.in_force, link_conditions(condition))
            plans.append(in_force)
            if rank == 0:
                link.send(tagged(RoundPlanned(index, planned)))
        every_link = possible_links(healthy.parallelism.stages)
        paths = RoundPaths(rendezvous, trainer, every_link) if healthy.fails_over else None
        rounds = Rounds(wanted, trainer, runner, planner, paths, first)
        for index, in_force in enumerate(plans):
            for message in rounds.run(block - 1, index, in_force):
                link.send(tagged(message))


if __name__ == "__main__":
    run_rank(_run_rank)
