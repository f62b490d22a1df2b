"""Turns the ranks' reports into step records and events, on a thread of rank 0.

Steps and events are written to the run directory here. They and all other messages
(`jaxmorph.messages`) then go to `record.RunRecord`, in the process that the user started.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

from jaxmorph.config import Config
from jaxmorph.control import controller
from jaxmorph.control.controller_state import StepObserved
from jaxmorph.control.events import describe_states
from jaxmorph.control.measurements import link_medians_ms
from jaxmorph.control.path_reports import PathReport, join_reports
from jaxmorph.control.profiler import Profile, Profiler
from jaxmorph.control.rank_times import (
    RankTimes,
    bubble_rate_of,
    copies_ms_of,
    joined_messages,
    op_times_of,
)
from jaxmorph.messages import (
    EventEmitted,
    ProfileUpdated,
    RunMessage,
    RunStarted,
    StepDone,
    StepTimelines,
)
from jaxmorph.plain_json import dump
from jaxmorph.records import CHANGES, Event, EventKind, Link, StepRecord
from jaxmorph.report.run_directory import RunLines
from jaxmorph.runtime.report import (
    OfReplicas,
    StepReport,
    StepTotals,
    parts_of,
    peaks_of,
    probe_times,
    reported_events,
    timings_of,
    total_auxiliary,
    total_compilations,
)
from jaxmorph.stage.model_flops import DeviceWork
from jaxmorph.training.control_loop import ControlLoop, Expected, Morph
from jaxmorph.training.evaluation import NOT_EVALUATED, HeldOutLoss
from jaxmorph.training.plan_in_force import PlanInForce
from jaxmorph.training.planning_client import Simulated
from jaxmorph.training.starting_point import KnownLinks

AROUND = 2
"""How many steps before and after a change leave timelines."""
_MOST_WAITING = 2 * AROUND + 2  # timelines that wait for their simulations


class StepRecorder:
    """Sends a record of each step, and the run's events.

    Args:
        profiler: The measurements so far; each step adds its own.
        active: True on rank 0; on other ranks every call does nothing.
        loop: The controller, which observes each step.
        known_links: Finds changes in degraded links to keep for a restart; None: none are kept.
        work: Returns what devices compute in a step; if that is None, their speed is not recorded.
        members: The run's number of each rank of the replica; empty: as in the replica.
        lines: Where steps and events are written before they are sent; None: a run
            without a directory.
    """

    def __init__(
        self,
        config: Config,
        in_force: PlanInForce,
        profiler: Profiler,
        send: Callable[[RunMessage], None],
        *,
        active: bool,
        first_step: int = 0,
        loop: ControlLoop | None = None,
        known_links: KnownLinks | None = None,
        work: Callable[[], DeviceWork | None] = lambda: None,
        members: Sequence[int] = (),
        lines: RunLines | None = None,
    ) -> None:
        self._config = config
        self._plan, self._simulate = in_force.plan, in_force.simulate
        self._expected: Expected | None = None  # the next step
        self._profiler = profiler
        self._lines, self._send_on = lines, send
        self._cannot_write = False
        self._traced = TracedSteps(
            config, self._write, lambda step: self._controlled.simulate_times(step)
        )
        self._send = self._traced.send
        self._first_step = first_step
        self._loop = loop
        self._known_links, self._members = known_links, members
        self._find_work = work
        self._work: DeviceWork | None = None
        self._began_s = time.monotonic()
        self.unwritten = ""
        self._error: BaseException | None = None
        self._thread = ThreadPoolExecutor(1, "jaxmorph-recorder") if active else None
        # A disk may be slow, and decisions are made on the other thread.
        self._syncing = ThreadPoolExecutor(1, "jaxmorph-sync") if active else None

    def start(
        self,
        data: str,
        num_parameters: int,
        layers: Sequence[range],
        cut_reason: str = "",
        equipped: str = "",
    ) -> None:
        """Send the run's header and its first events.

        Args:
            cut_reason: Why the layers are cut so; empty if there was no choice.
            equipped: The device, the slots and the memory budget in words, for `plan_adopted`.
        """
        placement = self._config.placement
        per_stage = [
            sum(len(layers[own]) for own in placement.own_stages(rank))
            for rank in range(placement.num_ranks)
        ]
        started = RunStarted(
            data=data,
            num_parameters=num_parameters,
            layers_per_stage=tuple(per_stage),
            cut_reason=cut_reason,
            schedule=self._plan.schedule.name,
            warmup_forwards=self._plan.schedule.warmup_forwards,
            evaluates=self._config.evaluation.every_steps is not None,
        )
        self._submit(self._send_start, started, equipped)

    def record(
        self,
        step: int,
        totals: StepTotals,
        reports: Sequence[StepReport],
        step_s: float,
        held_out: HeldOutLoss = NOT_EVALUATED,
    ) -> None:
        """Send the record of a step, and its events."""
        step_began_s = time.monotonic() - self._began_s - step_s - held_out.took_s
        self._submit(self._send_step, step, totals, reports, step_s, held_out.loss)
        self._submit(self._send_link_events, step, reports, step_began_s)

    def relay(self, messages: Iterable[RunMessage]) -> None:
        """Send what other replicas have recorded."""
        for message in messages:
            self._submit(self._send, message)

    def settle(self) -> None:
        """Wait until all that was recorded is sent."""
        if self._thread is not None:
            self._submit(self._traced.finish)
            self._thread.submit(self._raise_error).result()

    def adopt(self, morph: Morph, step: int) -> None:
        """Send the events of a new plan, which `step` is the first to run."""
        self._submit(self._switch_plan, morph, step)

    def drop(self, step: int) -> None:
        """Send the events of an announced plan that `step` does not run."""
        self._submit(self._keep_plan, step)

    def emit(
        self, step: int, kind: EventKind, detail: str, evidence: Mapping[str, Any] | None = None
    ) -> None:
        """Send an event."""
        self._submit(self._emit, step, kind, detail, None, evidence)

    def checkpoint_fields(self) -> dict[str, Any]:
        """The plan and the links' states, as fields of a `Manifest`."""
        links = {} if self._loop is None else describe_states(self._loop.state.verdicts)
        return {"made_under": self._plan.in_words(), "link_states": links}

    def on_disk(self) -> Future[None]:
        """A future that is done once all steps and events so far are on disk, or has the error."""
        if self._thread is not None and self._syncing is not None:
            written = self._thread.submit(self._raise_error)  # it runs after all that is queued
            return self._syncing.submit(self._sync, written)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _sync(self, written: Future[None]) -> None:
        written.result()
        if self._lines is not None:
            self._lines.sync()

    def _write(self, message: RunMessage) -> None:
        """Write a step or an event, then send it: a reader that is slow or gone delays no line."""
        why = ""
        try:
            self._write_line(message)
        except OSError as error:
            why = f"{error.filename}: cannot be written: {error.strerror}; its lines wait"
        self._send_on(message)
        if why and not self._cannot_write:
            self._cannot_write = True
            self._emit(self._first_step, EventKind.FILES_DAMAGED, why)

    def _write_line(self, message: RunMessage) -> None:
        if self._lines is None:
            return
        match message:
            case StepDone(record):
                self._lines.write_step(record)
            case EventEmitted(event):
                self._lines.write_event(event)

    def _submit(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._thread is not None:
            self._raise_error()
            self._thread.submit(self._keep_error, work, *arguments)

    def _keep_error(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:  # raised again on the thread that trains
            self._error = self._error or error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if self._thread is not None and self._syncing is not None:
            self._thread.shutdown()  # the steps that are done are sent, even after an error
            self._syncing.shutdown()
            self._keep_error(self._traced.finish)
            if kind is None:
                self._end()

    def _end(self) -> None:
        self._raise_error()
        try:
            if self._lines is not None:
                self._lines.sync()
        except OSError as error:
            self.unwritten = f"{error.filename}: cannot be written: {error.strerror}"

    def _send_start(self, started: RunStarted, equipped: str) -> None:
        self._send(started)
        self._work = self._find_work()
        if started.cut_reason:
            chosen = f"{' '.join(map(str, started.layers_per_stage))}: {started.cut_reason}"
            self._emit(self._first_step, EventKind.LAYERS_CUT, chosen)
        detail = "; ".join(filter(None, (self._plan.reason, equipped)))
        self._emit(self._first_step, EventKind.PLAN_ADOPTED, detail)
        if self._config.adaptation.enabled is True and not self._config.adapts:
            why = "adaptation.enabled: true: a pipeline of one stage has no links to adapt to"
            self._emit(self._first_step, EventKind.WITHOUT_EFFECT, why)

    def _send_step(
        self,
        step: int,
        totals: StepTotals,
        reports: Sequence[StepReport],
        step_s: float,
        held_out_loss: float | None,
    ) -> None:
        loop, expected = self._controlled, self._expected or self._expect(None)
        ranks = timings_of(reports)
        observed = step_observed(step, reports)
        _, paths = controller.paths_of_step(loop.state, observed)
        # A step in which a path fails measures nothing: its timings include the stall.
        if not observed.paths.is_disturbed:
            self._profiler.add(observed.ops, copies_ms_of(ranks), paths.samples)
        # First, since the next step may already wait for the controller's decision.
        events = loop.observe(observed)
        self._send_known_links(step, loop)
        predicted, live_until = loop.predicted, self._config.schedule.live_until
        of_replicas = parts_of(reports, OfReplicas)[0]
        record = StepRecord(
            step=step,
            loss=totals.loss,
            held_out_loss=held_out_loss,
            auxiliary=total_auxiliary(reports) or None,
            grad_norm=totals.grad_norm,
            step_s=step_s,
            tokens_per_s=self._config.tokens_per_step / step_s,
            schedule=self._plan.schedule.name,
            warmup_forwards=self._plan.schedule.warmup_forwards,
            routes={str(link): route for link, route in paths.routes.items()},
            predicted_step_s=predicted.step_ms / 1e3,
            bubble_rate=bubble_rate_of(ranks),
            peak_live=tuple(each.peak_live.of(live_until) for each in ranks),
            peak_on_device=self._peak_on_device(ranks),
            peak_device_bytes=peaks_of(reports),
            compilations=total_compilations(reports),
            planned_bubble_rate=predicted.bubble_rate,
            link_states=controller.link_states(loop.state),
            link_ms=link_medians_ms(paths.samples) or None,
            replicas=of_replicas.steps or None,
            skipped=not totals.is_finite,
            **({} if self._work is None else self._work.rates(step_s)),
        )
        self._send(StepDone(record))
        for event in events:
            self._emit(step, **vars(event))
        if not totals.is_finite:
            evidence = _evidence(totals)
            self._emit(step, EventKind.STEP_SKIPPED, totals.in_words(), evidence=evidence)
        self._traced.record(step, expected, ranks)
        if self._traced.is_sampled(step):
            self._send(ProfileUpdated(self._profiler.profile().to_json()))
        self._expect(None if events else expected)

    def _expect(self, before: Expected | None) -> Expected:
        self._expected = self._controlled.expect(before, self._profile, self._simulate)
        return self._expected

    def _profile(self) -> Profile:
        return controller.expected_profile(self._controlled.state, self._profiler.profile())

    def _send_known_links(self, step: int, loop: ControlLoop) -> None:
        if self._known_links is None or not loop.state.adapts:
            return
        changed = self._known_links.take_changes(step, loop.state.detector.known_directions())
        if changed is not None:
            self._send(changed)

    def _peak_on_device(self, ranks: Sequence[RankTimes]) -> tuple[int, ...] | None:
        if not self._config.offload.enabled:
            return None
        return tuple(each.peak_on_device.of(self._config.schedule.live_until) for each in ranks)

    @property
    def _controlled(self) -> ControlLoop:
        if self._loop is None:
            raise ValueError("steps are recorded on rank 0, where the controller is")
        return self._loop

    def _switch_plan(self, morph: Morph, step: int) -> None:
        self._plan, self._simulate = morph.plan, morph.simulate
        for event in self._controlled.plan_changed(morph):
            self._emit(step, **vars(event))
        self._expect(None)

    def _keep_plan(self, step: int) -> None:
        for event in self._controlled.plan_dropped():
            self._emit(step, **vars(event))

    def _send_link_events(
        self, step: int, reports: Sequence[StepReport], step_began_s: float
    ) -> None:
        members = self._members or range(len(reports))
        for rank, found in reported_events(reports):
            event = Event(
                time_s=step_began_s + found.time_s,
                step=step,
                kind=found.kind,
                link=_link_name(rank, found.peer),
                detail=f"rank {members[rank]}: {found.detail}",
            )
            self._send(EventEmitted(event))

    def _emit(
        self,
        step: int,
        kind: EventKind,
        detail: str,
        link: str | None = None,
        evidence: Mapping[str, Any] | None = None,
    ) -> None:
        time_s = time.monotonic() - self._began_s
        event = Event(time_s, step, kind, link, detail, evidence or None)
        self._send(EventEmitted(event))


def step_observed(step: int, reports: Sequence[StepReport]) -> StepObserved:
    """A step as the controller observes it, from all ranks' reports."""
    ranks = timings_of(reports)
    return StepObserved(
        step,
        ops=op_times_of(ranks),
        probes_ms=probe_times(reports),
        paths=join_reports(parts_of(reports, PathReport)),
        messages=joined_messages(ranks),
    )


def _evidence(totals: StepTotals) -> dict[str, Any]:
    # As text, since JSON has no NaN and no infinity.
    return {
        "loss": f"{totals.loss:g}",
        "grad_norm": f"{totals.grad_norm:g}",
        "stages": {str(stage): what for stage, what in totals.not_finite.items()},
    }


def _link_name(rank: int, peer: int | None) -> str | None:
    return None if peer is None else str(Link.of(rank, peer))


@dataclass(frozen=True)
class _StepTimelines:
    step: int
    expected: Expected
    measured: Sequence[RankTimes]


class TracedSteps:
    """Sends the timelines of sampled steps, and of the steps around a change.

    A change is known only after the steps before it, so the last few timelines wait in memory.

    Args:
        simulate: Simulates an expected step, with all its times, beside training.
    """

    def __init__(
        self,
        config: Config,
        send: Callable[[RunMessage], None],
        simulate: Callable[[Expected], Future[Simulated]],
    ) -> None:
        self._config = config
        self._send, self._simulate = send, simulate
        self._waiting: deque[tuple[_StepTimelines, bool]] = deque()
        self._simulating: Future[Simulated] | None = None  # of the first that waits
        self._recent: deque[_StepTimelines] = deque(maxlen=AROUND + 1)
        self._until_step = -1

    def send(self, message: RunMessage) -> None:
        """Send a message, and after the event of a change the timelines before it."""
        self._send(message)
        if isinstance(message, EventEmitted) and message.event.kind in CHANGES:
            step = message.event.step
            self._until_step = max(self._until_step, step + AROUND)
            for recent in self._recent:
                if recent.step >= step - AROUND:
                    self._send_timelines(recent, around_change=True)
            self._recent.clear()
            self._send_simulated()

    def record(self, step: int, expected: Expected, measured: Sequence[RankTimes]) -> None:
        """Send a step's timelines, or keep them in case a change follows."""
        timelines = _StepTimelines(step, expected, measured)
        is_around = step <= self._until_step
        if is_around or self.is_sampled(step):
            # The last step's trace is the latest, and so it stays without the mark of a change.
            self._send_timelines(timelines, around_change=is_around and not self._is_last(step))
        else:
            self._recent.append(timelines)
        self._send_simulated()

    def is_sampled(self, step: int) -> bool:
        """Whether a step leaves its timelines, with or without a change."""
        every = self._config.trace.every_steps
        return self._is_last(step) or (every > 0 and step % every == 0)

    def _is_last(self, step: int) -> bool:
        return step == self._config.run.steps - 1

    def finish(self) -> None:
        """Send the timelines that still wait."""
        while self._waiting:
            expected = self._waiting[0][0].expected
            self._send_one(0, expected.in_this_process(with_times=True).times)

    def _send_timelines(self, step: _StepTimelines, *, around_change: bool) -> None:
        self._waiting.append((step, around_change))
        if len(self._waiting) > _MOST_WAITING:  # a step takes less time than its simulation
            self._send_one(1)

    def _send_simulated(self) -> None:
        while self._waiting:
            # One at a time, so that a plan that is requested meanwhile waits for no second one.
            self._simulating = self._simulating or self._simulate(self._waiting[0][0].expected)
            if not self._simulating.done():
                return
            simulated, self._simulating = self._simulating, None
            failed = simulated.cancelled() or simulated.exception() is not None
            self._send_one(0, () if failed else simulated.result().times)

    def _send_one(self, at: int, planned: tuple[str, ...] = ()) -> None:
        step, around_change = self._waiting[at]
        del self._waiting[at]
        timelines = {"planned": planned} if planned else {}
        timelines["measured"] = tuple(map(dump, step.measured))
        self._send(StepTimelines(step.step, timelines, around_change))
