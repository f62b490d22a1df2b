"""One rank of one system of a comparison, for all conditions: `python -m jaxmorph.compare_rank`.

What rank 0 tells are dictionaries of JSON's types with a `kind`:

- `plans`: a `PlannedRun` for each condition, in their order, before any of them is run.
- `steps`: the number of a `condition`, and `summarize_steps` of the steps of one round of it.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from jaxmorph.condition_plans import ConditionPlanner
from jaxmorph.condition_steps import ConditionRunner, summarize_steps
from jaxmorph.config import Config, load_config
from jaxmorph.config.compare_section import Compare
from jaxmorph.data import ReadAhead
from jaxmorph.declared_links import link_conditions
from jaxmorph.device_budget import with_device_budget
from jaxmorph.first_plan import settle_garbage, warm_up
from jaxmorph.layer_choice import choose_layers, measured_on_rank_0
from jaxmorph.open_stage import open_stage
from jaxmorph.planning import agree_on_plan, agree_on_stash
from jaxmorph.program.instructions import Payload
from jaxmorph.run_parts import load_parts, step_reader
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.join import join_as_told
from jaxmorph.runtime.rank_process import LauncherLink, RankArguments, run_rank
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.report import measured_timeline
from jaxmorph.runtime.stage_trainer import StageSettings
from jaxmorph.stage.model import PipelineModel
from jaxmorph.stage_settings import stage_settings
from jaxmorph.systems import SYSTEMS, System, system_config

Message = dict[str, Any]


def serve(
    config: Config,
    wanted: Compare,
    system: System,
    rendezvous: Rendezvous,
    tell: Callable[[Message], None],
) -> None:
    """Run one system under every condition, as one rank.

    Args:
        config: The configuration.
        wanted: What to compare.
        system: The system.
        rendezvous: The meeting place of all ranks of the system.
        tell: Takes what rank 0 has to say.
    """
    rank, healthy = rendezvous.rank, system_config(config, system)
    parts = load_parts(healthy)
    measure = partial(measured_on_rank_0, healthy, parts.model, parts.batches)
    cut = choose_layers(healthy, rendezvous, parts.model.num_layers, measure)
    read = step_reader(healthy, parts.batches, rank)
    settings = stage_settings(healthy, cut.layers, rank, adapts=system.adapts)
    links, num_tied = EmulatedLinks(), len(parts.model.tied)
    with (
        open_stage(healthy, rendezvous, parts.model, settings, links) as trainer,
        ReadAhead(read) as inputs,
    ):
        healthy = with_device_budget(healthy, rendezvous, trainer)
        links.emulate(())
        stash_bytes = agree_on_stash(rendezvous, trainer.stash_memory)
        profiler = warm_up(healthy, rendezvous, trainer, read(0), num_tied, stash_bytes)
        settle_garbage()
        rendezvous.limit(config.timeouts.step_s)
        runner = ConditionRunner(rendezvous, trainer, links, inputs, healthy.optimizer.clip_norm)
        first = agree_on_plan(healthy, rendezvous, profiler.profile(), num_tied)
        for step in runner.run(first, (), wanted.profiling_steps):
            if rank == 0:
                profiler.observe(measured_timeline(step.reports))
        profile, message_bytes = profiler.profile(), _message_bytes(settings, parts.model)
        planner = ConditionPlanner(healthy, system, rendezvous, profile, num_tied, message_bytes)
        told = [link_conditions(condition) for condition in wanted.conditions]
        made = [planner.make(conditions) for conditions in told]
        if rank == 0:
            tell({"kind": "plans", "plans": [asdict(planned) for _, planned in made]})
        for index in _turns(wanted):
            plan, _ = made[index]
            steps = runner.run(plan, told[index], wanted.steps, wanted.warmup_steps)
            if rank == 0:
                tell({"kind": "steps", "condition": index, **summarize_steps(steps)})


def _message_bytes(settings: StageSettings, model: PipelineModel) -> int:
    """The length of an activation, and of a gradient."""
    payloads = settings.payloads(model)
    carried = (payloads[channel] for channel in payloads if channel.payload is Payload.ACTIVATION)
    return max((prod(payload.shape) * payload.dtype.itemsize for payload in carried), default=0)


def _turns(wanted: Compare) -> list[int]:
    """Every condition once a round: what disturbs the machine for a while disturbs all alike."""
    return [*range(len(wanted.conditions))] * wanted.repeats


def _serve_as_told(arguments: RankArguments, link: LauncherLink, rest: list[str]) -> None:
    config_path, system = rest
    config = load_config(Path(config_path))
    rendezvous = join_as_told(
        arguments,
        start_timeout_s=config.timeouts.start_s,
        step_timeout_s=config.timeouts.step_s,
    )
    if config.compare is None:
        raise ValueError(f"{config_path} compares nothing")
    serve(config, config.compare, SYSTEMS[system], rendezvous, link.send)


if __name__ == "__main__":
    run_rank(_serve_as_told)
