"""A training run as one rank sees it, from its stage's parameters to the last step.

`train` is the whole of it; what it does comes below in the order in which it happens.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from jaxmorph.checkpoints.saver import CheckpointError, CheckpointSaver
from jaxmorph.config import Config
from jaxmorph.control.verdicts import dead_of
from jaxmorph.data import ReadAhead
from jaxmorph.emulation.link_conditions import LinkCondition, untimed
from jaxmorph.emulation.link_settings import emulated_conditions
from jaxmorph.errors import RunFailedError
from jaxmorph.records import COMPILE, LINKS_KNOWN, PLAN, RESTORE, RESUMED, START, Message
from jaxmorph.runtime.emulated_links import EmulatedLinks, agree_on_origin_s
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.join import device_kind
from jaxmorph.runtime.kept_programs import CompilationCounter
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import StepRunner
from jaxmorph.stage.model import taken_on_device
from jaxmorph.stage.parameters import parameter_count
from jaxmorph.training.adaptation import Adaptation, open_control_loop
from jaxmorph.training.bookkeeping import Bookkeeper
from jaxmorph.training.carried_over import KnownLinks, chosen_before, keep_choice, known_links
from jaxmorph.training.device_budget import WithinDevices, budget_in_words, with_device_budget
from jaxmorph.training.evaluation import Evaluation, with_room_to_evaluate
from jaxmorph.training.first_plan import FirstPlan, plan_by_timings, settle_garbage
from jaxmorph.training.layer_choice import LayerChoice, choose_layers, measured_on_rank_0
from jaxmorph.training.open_stage import open_stage, stage_settings
from jaxmorph.training.run_checkpoints import RunCheckpoints
from jaxmorph.training.run_parts import RunParts, load_parts, step_reader
from jaxmorph.training.save_times import STOPPED, SaveTimes, SkippedSteps


@dataclass(frozen=True)
class _Run:
    """What a rank has loaded, or come to with the others, before its stage is compiled."""

    within: WithinDevices
    directory: Path
    rendezvous: Rendezvous
    checkpoints: RunCheckpoints
    first_step: int
    parts: RunParts
    taken: str
    cut: LayerChoice
    settings: StageSettings
    conditions: tuple[LinkCondition, ...]
    links: EmulatedLinks
    read: Callable[[int], StepInputs]

    @property
    def config(self) -> Config:
        return self.within.first

    @property
    def num_tied(self) -> int:
        return len(self.parts.model.tied)


@dataclass(frozen=True)
class _BesideSteps:
    """What goes along with the steps: it evaluates, tells, saves and adapts."""

    runner: StepRunner
    evaluation: Evaluation
    bookkeeper: Bookkeeper
    saver: CheckpointSaver
    times: SaveTimes
    adaptation: Adaptation
    skipped: SkippedSteps

    def report(self, step: int) -> Message:
        """What they add to this rank's report of a step."""
        of_links = self.adaptation.told(step) | self.adaptation.probed()
        return self.saver.told() | self.times.told() | of_links


def train(
    config: Config,
    rendezvous: Rendezvous,
    tell: Callable[[Message], None],
    directory: Path,
    first_step: int = 0,
    *,
    restarts: int = 0,
    stop_asked: Callable[[], bool] = lambda: False,
) -> bool:
    """Train as one rank of a run.

    Args:
        tell: Takes what rank 0 has to say of the run (see `bookkeeping`), and of each rank when it
            has come to the end of a phase of its start (see `recovery.ledger`).
        first_step: The step to begin with: 0, or how many the checkpoint to go on from has done.
        stop_asked: Whether this process has been asked to save and end; asked at each step's end.

    Returns:
        Whether the last step has been done; if not, some rank was asked to end.

    Raises:
        UserError: If model, data and sizes don't fit one another.
        CheckpointError: If the last state could not be saved.
        RunFailedError: If too many steps in a row were not finite.
    """
    compilations = CompilationCounter()
    run = _load(config, rendezvous, directory, first_step, restarts)
    _tell_end_of(START, tell)
    with (
        open_stage(run.config, rendezvous, run.parts.model, run.settings, run.links) as trainer,
        ReadAhead(run.read, first_step) as inputs,
    ):
        _tell_end_of(COMPILE, tell)
        run = _take_up_state(run, trainer)
        _tell_end_of(RESTORE, tell)
        first = _plan(run, trainer)
        _begin_time(run, trainer)
        _tell_end_of(PLAN, tell)
        with _open_beside_steps(run, trainer, first, tell, compilations, stop_asked) as beside:
            _tell_start(run, first, beside.bookkeeper)
            is_done = _take_steps(run, inputs, first, beside)
            failure = beside.saver.finish()
        _require_finite(rendezvous, beside.skipped)
        _require_saved(rendezvous, failure)
    return is_done


def _tell_end_of(phase: str, tell: Callable[[Message], None]) -> None:
    """How far this rank has come: what a failure costs is split by it, whichever rank is last."""
    tell({"kind": "phase_ended", "phase": phase, "time_s": time.monotonic()})


def _load(
    config: Config, rendezvous: Rendezvous, directory: Path, first_step: int, restarts: int
) -> _Run:
    """Model, data and the checkpoint to go on from; and all ranks agree on the cut."""
    checkpoints = RunCheckpoints(config, directory, first_step)
    config = checkpoints.starting_config
    parts = load_parts(config)
    sizes = config.batch.microbatch_size, config.data.sequence_length
    taken = taken_on_device(parts.model, *sizes)
    checkpoints.require_shared(rendezvous)
    cut = checkpoints.cut or _choose_layers(config, rendezvous, directory, parts)
    return _Run(
        WithinDevices(config, config),
        directory,
        rendezvous,
        checkpoints,
        first_step,
        parts,
        taken,
        cut,
        settings=stage_settings(config, cut.layers, rendezvous.rank, adapts=config.adapts),
        conditions=emulated_conditions(config, restarts),
        links=EmulatedLinks(),
        read=step_reader(config, parts.batches, rendezvous.rank),
    )


def _choose_layers(
    config: Config, rendezvous: Rendezvous, directory: Path, parts: RunParts
) -> LayerChoice:
    """The cut of an earlier life of the run, whatever would be measured now; else a new one."""
    num_layers, leads = parts.model.num_layers, rendezvous.rank == 0
    measure = partial(measured_on_rank_0, config, parts.model, parts.batches)
    chosen = chosen_before(directory, config, num_layers) if leads else None
    cut = choose_layers(config, rendezvous, num_layers, measure, chosen)
    if leads:
        keep_choice(directory, config, cut.layers)
    return cut


def _take_up_state(run: _Run, trainer: StageTrainer) -> _Run:
    """The checkpoint's state, if there is one; and the memory that compiled stages leave."""
    own_stages = run.settings.own_stages(run.rendezvous.rank)
    run.checkpoints.restore(trainer, [run.settings.layers[stage] for stage in own_stages])
    return replace(run, within=with_device_budget(run.config, run.rendezvous, trainer))


def _plan(run: _Run, trainer: StageTrainer) -> FirstPlan:
    """A few steps are measured, on links as they are before the first step, and one is planned.

    What an earlier life of the run knew of its links is planned for, too.
    """
    run.links.emulate(untimed(run.conditions))
    make_room = partial(with_room_to_evaluate, run.config)
    known = known_links(run.config, run.rendezvous, run.directory, run.cut.layers)
    return plan_by_timings(
        run.config, run.rendezvous, trainer, run.read(0), run.num_tied, make_room, known
    )


def _begin_time(run: _Run, trainer: StageTrainer) -> None:
    """From here on it is training's time: of its patience with ranks, and of links that change."""
    settle_garbage()
    trainer.events()  # those of the start
    run.rendezvous.limit(run.config.timeouts.step_s)
    run.links.emulate(run.conditions, agree_on_origin_s(run.rendezvous))


@contextmanager
def _open_beside_steps(
    run: _Run,
    trainer: StageTrainer,
    first: FirstPlan,
    tell: Callable[[Message], None],
    compilations: CompilationCounter,
    stop_asked: Callable[[], bool],
) -> Iterator[_BesideSteps]:
    """What goes along with the steps; rank 0 decides and tells, and every rank saves."""
    config, rendezvous, in_force = run.config, run.rendezvous, first.in_force
    leads, failed = rendezvous.rank == 0, dead_of(first.known)
    runner = StepRunner(trainer, rendezvous, config.optimizer.clip_norm, compilations)
    evaluation = Evaluation(config, runner, in_force.programs, run.parts.held_out)
    with (
        open_control_loop(
            config, first, run.num_tied, active=leads, to_plan=run.within.new
        ) as loop,
        Bookkeeper(
            config,
            in_force,
            first.profiler,
            tell,
            active=leads,
            first_step=run.first_step,
            loop=loop,
            known_links=KnownLinks(config, run.directory, run.cut.layers),
        ) as bookkeeper,
        run.checkpoints.saver(rendezvous, run.settings, run.parts, bookkeeper) as saver,
    ):
        adaptation = Adaptation(
            rendezvous,
            trainer,
            bookkeeper,
            loop,
            last_step=config.run.steps - 1,
            adapts=config.adapts,
            failed=failed,
        )
        times = SaveTimes(config.checkpoint, config.run.steps, leads=leads, stop_asked=stop_asked)
        skipped = SkippedSteps(config.optimizer.stop_after_skipped)
        yield _BesideSteps(runner, evaluation, bookkeeper, saver, times, adaptation, skipped)


def _tell_start(run: _Run, first: FirstPlan, bookkeeper: Bookkeeper) -> None:
    cut, num_parameters = run.cut, parameter_count(run.parts.model)
    computes_on = f"rank 0 computes on {device_kind()}"
    room = budget_in_words(run.checkpoints.starting_config, run.within)
    equipped = "; ".join(filter(None, (computes_on, first.equipped, run.taken, room)))
    bookkeeper.start(run.parts.source, num_parameters, cut.layers, cut.reason, equipped)
    if run.first_step > 0:
        bookkeeper.event(run.first_step, RESUMED, run.checkpoints.origin(cut.layers))
    if first.known:
        known = ", ".join(each.in_words() for each in first.known)
        bookkeeper.event(run.first_step, LINKS_KNOWN, f"begins with links as they were: {known}")


def _take_steps(
    run: _Run,
    inputs: ReadAhead[StepInputs],
    first: FirstPlan,
    beside: _BesideSteps,
) -> bool:
    """All steps, or those until the run is to end; whether the last one has been done.

    A step lasts from the meeting that ends the one before to the meeting that ends it.
    The update and what the step leaves to be done come after the meeting: they are in the next
    step's time, but for an evaluation, which is in none.
    """
    config, program = run.config, first.in_force.program
    barrier_s = time.monotonic()
    for step in range(run.first_step, config.run.steps):
        result = beside.runner.run(
            program, next(inputs), step, began_s=barrier_s, report=beside.report
        )
        held_out = beside.evaluation.after(step)
        barrier_s = result.ended_s + held_out.took_s
        beside.bookkeeper.note(step, result.totals, result.reports, result.step_s, held_out)
        beside.saver.heed(result.parts)
        if beside.skipped.note(step, result.totals):
            return False
        after = beside.times.heed(step + 1, result.parts)
        is_last = after.stops or step + 1 == config.run.steps
        if beside.skipped.lets_save(after.saves, is_last=is_last):
            beside.saver.save(step + 1, beside.runner.stage.state)
        if after.stops:
            done = f"asked to end after {step + 1} of {config.run.steps} steps"
            beside.bookkeeper.event(step, STOPPED, done)
            return False
        if (morphed := beside.adaptation.heed(step, result.parts)) is not None:
            program = morphed
            beside.evaluation.adopt(program)
    return True


def _require_finite(rendezvous: Rendezvous, skipped: SkippedSteps) -> None:
    if skipped.why_stop:
        rendezvous.exchange({})  # as below
        raise RunFailedError(skipped.why_stop)


def _require_saved(rendezvous: Rendezvous, failure: str) -> None:
    if failure:
        rendezvous.exchange({})  # rank 0 has told of it, and no rank ends before
        raise CheckpointError(f"the last state could not be saved: {failure}")
