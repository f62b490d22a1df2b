"""One rank of a run: load, open the stage, plan, and begin training, in the order of this file.

`train` calls these functions with the configuration's data, `Trainer` with a script's batches.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import optax

from jaxmorph.checkpoints.saver import CheckpointError, CheckpointSaver
from jaxmorph.config import Config
from jaxmorph.control.remap import SlowPair
from jaxmorph.control.verdicts import KnownDirection, dead_of
from jaxmorph.emulation.link_conditions import LinkCondition, before_step
from jaxmorph.emulation.link_settings import (
    emulated_conditions,
    hardware_conditions,
    sum_conditions,
)
from jaxmorph.errors import RunFailedError
from jaxmorph.messages import ReplicaMessage, RunMessage
from jaxmorph.placement import Position
from jaxmorph.program.slots_needed import HostRoom
from jaxmorph.records import EventKind
from jaxmorph.report.run_directory import (
    ObservationFiles,
    RunLines,
    control_folder,
    links_file,
)
from jaxmorph.runtime.compiled_stage import CompiledStage, compile_stage, is_compiled_alike
from jaxmorph.runtime.emulated_links import EmulatedLinks, agree_on_origin_s
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.join import own_devices
from jaxmorph.runtime.kept_programs import CompilationCounter
from jaxmorph.runtime.rendezvous import Rendezvous, agree
from jaxmorph.runtime.replicas import Replicas
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import StepRunner
from jaxmorph.runtime.xla_settings import settings_in_force
from jaxmorph.stage.model import MicrobatchShapes, PipelineModel, device_choices
from jaxmorph.stage.parameters import parameter_count
from jaxmorph.training.adaptation import Adaptation, open_control_loop
from jaxmorph.training.callbacks import (
    Recording,
    SaveTimes,
    Saving,
    SkippedSteps,
    keep_message,
)
from jaxmorph.training.cluster import first_layout
from jaxmorph.training.device_memory import WithinDevices, budget_in_words, with_device_budget
from jaxmorph.training.evaluation import Evaluation
from jaxmorph.training.first_plan import FirstPlan, plan_by_timings, predicted_step_s
from jaxmorph.training.host_memory import agree_on_host_room, room_in_words
from jaxmorph.training.layer_choice import (
    LayerChoice,
    choose_layers,
    choose_placement,
    measured_on_rank_0,
)
from jaxmorph.training.loop import Callback, Loop
from jaxmorph.training.open_stage import open_gradient_sum, open_stage, stage_settings
from jaxmorph.training.own_data import StepData
from jaxmorph.training.remap import Moved, Remapping
from jaxmorph.training.run_checkpoints import RunCheckpoints, TrainedOn
from jaxmorph.training.run_parts import (
    check_together,
    device_work,
    step_reader,
    unreached_in_words,
)
from jaxmorph.training.starting_point import KnownLinks, known_links
from jaxmorph.training.step_recorder import StepRecorder


@dataclass(frozen=True)
class Run:
    """What a rank knows before it compiles its stage.

    Attributes:
        config: As this rank's replica sees it (`Config.of_replica`).
        of_all: As all replicas see it, with what `schedule.placement: auto` became.
        checkpoints: None for a script's run without a directory.
        taken: Which kernels the model uses on this device, in words.
        unreached: The parameters that no gradient reaches.
        conditions: Emulated on the replica's links.
        of_sums: Emulated between this stage's ranks, by replica.
        first_step: The step at which the run begins, resumes, or continues after a remap.
        slow: The slow pairs of ranks that the layout avoids.
        skipped: Has counted skipped steps before ranks changed places; None: they have not.
    """

    config: Config
    of_all: Config
    replicas: Replicas
    model: PipelineModel
    checkpoints: RunCheckpoints | None
    taken: str
    unreached: tuple[str, ...]
    cut: LayerChoice
    settings: StageSettings
    conditions: tuple[LinkCondition, ...]
    links: EmulatedLinks
    of_sums: tuple[LinkCondition, ...]
    first_step: int = 0
    slow: tuple[SlowPair, ...] = ()
    skipped: SkippedSteps | None = None

    @property
    def rendezvous(self) -> Rendezvous:
        """Of this rank's replica."""
        return self.replicas.pipeline

    @property
    def leads(self) -> bool:
        """Whether this rank plans and decides for its replica."""
        return self.rendezvous.rank == 0

    @property
    def records(self) -> bool:
        """Whether this rank records the run."""
        return self.leads and self.replicas.own.index == 0

    @property
    def begins(self) -> bool:
        """Whether the run starts or resumes here; False if ranks have only changed places."""
        return self.skipped is None

    @property
    def own_layers(self) -> list[range]:
        """The layers of each of this rank's virtual stages."""
        own_stages = self.settings.own_stages(self.rendezvous.rank)
        return [self.settings.layers[stage] for stage in own_stages]

    def open_stage(self, moved: Moved | None = None) -> AbstractContextManager[StageTrainer]:
        """Open this rank's stage, compiled if need be; all ranks call this at the same point."""
        return open_stage(
            self.config,
            self.rendezvous,
            self.model,
            self.settings,
            self.links,
            moved and moved.stage,
            moved and moved.compiled,
        )

    def compile_stage(self, own: StageTrainer, at: Position) -> CompiledStage:
        """The stage at another position of the mesh, compiled for this rank.

        Args:
            own: The rank's present stage, whose programs may be the same.
        """
        settings = replace(self.settings, replica=replace(self.replicas.own, index=at.replica))
        if is_compiled_alike(self.settings, self.rendezvous.rank, settings, at.stage):
            return own.compiled
        # Without stamps: they say what the rank does, which trains meanwhile.
        return compile_stage(self.model, settings, at.stage, own.submesh, lambda doing: None)

    def restore(self, stage: StageTrainer, moved: Moved | None = None) -> None:
        """Restore the checkpoint's state, if the run resumes, or what this rank was sent."""
        if moved is not None:
            moved.restore(stage)
        elif self.checkpoints is not None:
            self.checkpoints.restore(stage, self.own_layers)


def load_run(
    config: Config,
    rendezvous: Rendezvous,
    model: PipelineModel,
    checkpoints: RunCheckpoints | None,
    *,
    microbatch: Callable[[], MicrobatchShapes] | None = None,
    shapes: MicrobatchShapes | None = None,
    optimizer: optax.GradientTransformation | None = None,
    restarts: int = 0,
    moved: Moved | None = None,
    cut: LayerChoice | None = None,
) -> Run:
    """Check the model and cut it into stages; all ranks agree on the cut.

    Args:
        rendezvous: Of all ranks.
        microbatch: Returns the arrays of one; None for a script: layers are measured on zeros.
        shapes: The data of one microbatch; None: the configured text's.
        optimizer: None: the configuration's AdamW.
        moved: Where ranks are now, if they have changed places; the model is not checked again.
        cut: How the layers were cut before.
        restarts: How often the run was restarted; emulated cuts end with a restart, and the model
            is not checked again.

    Raises:
        UserError: The model would be trained wrongly.
    """
    layout = moved.layout if moved else first_layout(config, rendezvous)
    replicas = Replicas.of(rendezvous, layout)
    pipeline = replicas.pipeline
    sizes = config.batch.microbatch_size, config.data.sequence_length
    shapes = shapes or MicrobatchShapes.of_text(*sizes)
    taken, unreached = device_choices(model, *sizes, shapes.extras), ()
    if restarts == 0 and moved is None:  # else the model was checked before the failure
        unreached = check_together(config, pipeline, model, shapes, microbatch)
    if checkpoints is not None:
        checkpoints.require_shared(rendezvous)
    measure = cache(partial(measured_on_rank_0, config, model, microbatch or shapes.zeros))
    before = None if checkpoints is None else checkpoints.is_in_a_v
    of_all, placed = choose_placement(config, rendezvous, model, measure, before)
    if checkpoints is not None:
        checkpoints.place(in_a_v=of_all.placement.kind == "v")
    config = of_all.of_replica(replicas.own.index)
    kept, directory = (checkpoints.cut, checkpoints.directory) if checkpoints else (None, None)
    cut = cut or kept or choose_layers(config, rendezvous, model.num_layers, measure, directory)
    settings = stage_settings(
        config,
        cut.layers,
        pipeline.rank,
        adapts=config.adapts,
        shapes=shapes,
        ranks=layout.ranks[replicas.own.index],
        replica=replicas.own,
    )
    if optimizer is not None:
        settings = replace(settings, optimizer=optimizer)
    index = replicas.own.index
    conditions = emulated_conditions(config, restarts, layout, index)
    of_sums = sum_conditions(config, layout, pipeline.rank, restarts)
    return Run(
        config,
        of_all,
        replicas,
        model,
        checkpoints,
        taken,
        unreached,
        LayerChoice(cut.layers, "; ".join(filter(None, (placed, cut.reason)))),
        settings,
        conditions,
        EmulatedLinks(hardware_conditions(config.emulation, config.parallelism.stages)),
        of_sums,
        moved.step if moved else checkpoints.first_step if checkpoints else 0,
        moved.slow if moved else (),
        moved and moved.skipped,
    )


@dataclass(frozen=True)
class Planned:
    """The first plan, and the memory caps that plans keep."""

    within: WithinDevices
    first: FirstPlan


def plan_run(run: Run, stage: StageTrainer, inputs: StepInputs, *, evaluates: bool) -> Planned:
    """Measure a few steps and plan; degraded links known from an earlier launch are planned for.

    Args:
        inputs: The data of each of these steps, of the longest length; the steps update nothing.
        evaluates: Whether the run may evaluate between steps.
    """
    within = with_device_budget(run.config, run.rendezvous, stage)
    payloads, delegated = run.settings.payloads(run.model), run.settings.delegated
    room = agree_on_host_room(run.config, run.rendezvous, stage, payloads, delegated)
    run.links.emulate(before_step(run.conditions, run.first_step))
    known: tuple[KnownDirection, ...] = ()
    if run.checkpoints is not None and run.begins:
        path = links_file(run.checkpoints.directory, run.replicas.own.index)
        known = known_links(within.for_first_plan, run.rendezvous, path, run.cut.layers)
    first = plan_by_timings(
        within.for_first_plan,
        run.rendezvous,
        stage,
        inputs,
        len(run.model.tied),
        known,
        room,
        evaluates=evaluates,
    )
    return Planned(within, first)


@dataclass(frozen=True)
class Training:
    """The loop, and the parts that its caller uses."""

    loop: Loop
    recording: Recording
    skipped: SkippedSteps
    saver: CheckpointSaver | None
    recorder: StepRecorder
    remapping: Remapping | None = None
    room: HostRoom | None = None

    def finish(self) -> str:
        """Wait for the save in progress; returns why the last save failed, or ""."""
        return "" if self.saver is None else self.saver.finish()


def fail_together(rendezvous: Rendezvous, unwritten: str, why_stop: str, unsaved: str) -> None:
    """Raise what failed, on all ranks; none ends before rank 0 has reported it.

    Args:
        rendezvous: Of all ranks.
        unwritten: The file that rank 0 can't write, and why; "" if there is none.
        why_stop: Why the run gave up, the same on all ranks; "" if it didn't.
        unsaved: On rank 0, why the last state was not saved; "" if it was.

    Raises:
        RunFailedError: One of the three is not empty.
    """
    if unwritten := agree(rendezvous, str, unwritten):
        raise RunFailedError(unwritten)
    if why_stop:
        raise RunFailedError(why_stop)
    if unsaved := agree(rendezvous, str, unsaved):
        raise CheckpointError(f"the last state could not be saved: {unsaved}")


@contextmanager
def begin_training(
    run: Run,
    stage: StageTrainer,
    planned: Planned,
    send: Callable[[RunMessage], None],
    source: str,
    *,
    num_steps: int | None,
    trained_on: TrainedOn,
    held_out: StepData | None = None,
    compilations: CompilationCounter | None = None,
    stop_asked: Callable[[], bool] = lambda: False,
) -> Iterator[Training]:
    """Build the loop and its callbacks, and start the clock of emulated links.

    Args:
        send: Takes rank 0's messages.
        source: Where the data come from, in words.
        num_steps: The run's steps; None for a script, which takes as many as it likes.
        trained_on: What checkpoints record about the data.
        held_out: The batches to evaluate; None: never evaluate.
        stop_asked: Whether this process has been asked to save and stop.
    """
    config, rendezvous, first = planned.within.for_first_plan, run.rendezvous, planned.first
    checkpoints, step_s = run.checkpoints, config.timeouts.step_s
    last_step = None if num_steps is None else num_steps - 1
    skipped = run.skipped or SkippedSteps(config.optimizer.stop_after_skipped)
    saver = None
    with ExitStack() as opened:
        gradient_sum = opened.enter_context(
            open_gradient_sum(config, run.replicas, stage, run.of_sums)
        )
        run.replicas.all_ranks.limit(step_s)
        clip_norm = config.optimizer.clip_norm
        runner = StepRunner(stage, rendezvous, clip_norm, compilations, step_s, gradient_sum)
        own = rendezvous.rank, stage, run.replicas.own
        of_held_out = None if held_out is None else step_reader(config, held_out, *own)
        evaluation = Evaluation(config, runner, first.in_force.programs, of_held_out)
        lines, known_links, observations, messages, send = None, None, None, *_sender(run, send)
        if run.leads and checkpoints is not None:
            where = checkpoints.directory, run.replicas.own.index
            known_links = KnownLinks(run.config, links_file(*where), run.cut.layers)
            if checkpoints.directory.is_dir():  # only replica 0's host may have it
                observations = ObservationFiles(control_folder(*where))
        if run.records and checkpoints is not None:
            lines = opened.enter_context(closing(RunLines(checkpoints.directory)))
        control = opened.enter_context(
            open_control_loop(
                config,
                first,
                len(run.model.tied),
                active=run.leads,
                to_plan=planned.within.for_later_plans,
                keep=observations,
            )
        )
        recorder = opened.enter_context(
            StepRecorder(
                config,
                first.in_force,
                first.profiler,
                send,
                active=run.leads and (checkpoints is not None or config.adapts),
                first_step=run.first_step,
                loop=control,
                known_links=known_links,
                work=partial(device_work, config, run.model, run.settings.shapes),
                lines=lines,
                members=rendezvous.members,
            )
        )
        plan = first.in_force.plan
        recording = Recording(recorder, evaluation, plan, messages, records=run.records)
        callbacks: list[Callback] = [evaluation, recording, skipped]
        if checkpoints is not None:
            saver = opened.enter_context(
                checkpoints.saver(run.replicas, run.settings, run.model.tied, trained_on, recorder)
            )
            times = SaveTimes(
                config.checkpoint, num_steps, leads=run.records, stop_asked=stop_asked
            )
            callbacks.append(Saving(times, skipped, saver, stage, recorder, num_steps))
        adaptation = Adaptation(
            rendezvous,
            stage,
            recording,
            control,
            last_step=last_step,
            adapts=config.adapts,
            failed=dead_of(first.known),
        )
        callbacks.append(adaptation)
        remapping = None
        if config.remaps and gradient_sum is not None:
            remapping = Remapping(
                config,
                partial(predicted_step_s, config, first, len(run.model.tied)),
                recorder,
                gradient_sum,
                stage,
                partial(run.compile_stage, stage),
                known=run.slow,
                active=run.records,
                last_step=last_step,
            )
            callbacks.append(remapping)
        if run.leads:
            _announce(run, planned, recorder, source, trained_on)
        run.links.emulate(run.conditions, agree_on_origin_s(run.replicas.all_ranks))
        loop = Loop(runner, first.in_force.program, callbacks, run.first_step)
        yield Training(loop, recording, skipped, saver, recorder, remapping, first.room)


def _sender(
    run: Run, send: Callable[[RunMessage], None]
) -> tuple[deque[ReplicaMessage] | None, Callable[[RunMessage], None]]:
    """The messages that a replica keeps for the one that records, and what takes its messages.

    Of the other replicas, only events, timelines and degraded links are recorded.
    """
    if run.replicas.own.is_alone or not run.leads:
        return None, send
    messages: deque[ReplicaMessage] = deque()
    if run.records:
        return messages, send
    return messages, partial(keep_message, messages, run.replicas.own.index)


def _announce(
    run: Run, planned: Planned, recorder: StepRecorder, source: str, trained_on: TrainedOn
) -> None:
    """Report what runs, from which checkpoint, and with which degraded links."""
    cut, known = run.cut, planned.first.known
    words = (
        *device_in_words(own_devices()[0], run.settings),
        planned.first.equipped,
        run.taken,
        budget_in_words(run.config, planned.within),
        room_in_words(planned.first.in_force, planned.first.room),
    )
    resources = "; ".join(filter(None, words))
    num_parameters = parameter_count(run.model)
    recorder.start(source, num_parameters, cut.layers, cut.reason, resources)
    if run.unreached:
        detail = unreached_in_words(run.unreached)
        recorder.emit(run.first_step, EventKind.WITHOUT_GRADIENT, detail)
    if run.checkpoints is not None and run.begins and run.first_step > 0:
        origin = run.checkpoints.origin(cut.layers, trained_on)
        recorder.emit(run.first_step, EventKind.RESUMED, origin)
    if known:
        links = ", ".join(each.in_words() for each in known)
        detail = f"begins with links as they were: {links}"
        recorder.emit(run.first_step, EventKind.LINKS_KNOWN, detail)


def device_in_words(device: Any, settings: StageSettings) -> Iterator[str]:
    """What rank 0 computes on, what is set for it, and what is not verified on GPUs yet."""
    yield f"rank 0 computes on {device.device_kind}"
    if device.platform == "cpu" or settings.num_ranks == 1:
        return
    yield f"set for GPUs: {', '.join(settings_in_force(fails_over=settings.fails_over))}"
    used = {
        "direct links": settings.direct is None or settings.direct,
        "failover": settings.failing_over,
        "delegated links": settings.delegated,
    }
    unverified = ", ".join(name for name, is_used in used.items() if is_used)
    yield f"not verified on GPUs yet: {unverified}"
