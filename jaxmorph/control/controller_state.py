"""What the controller keeps, observes and commands: plain values, for `controller.advance`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from jaxmorph.config.sections import Adaptation
from jaxmorph.control.compute_watch import ComputeNotice, ComputeWatch
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.detector import Detector
from jaxmorph.control.events import ControlEvent, PlanChange, verdict_event
from jaxmorph.control.link_state import FailedPaths
from jaxmorph.control.measurements import LinkSample, OpTime
from jaxmorph.control.orchestrator import Decision, Dwell, Options, Situation
from jaxmorph.control.path_reports import NO_NEWS, PathNews
from jaxmorph.control.probes import ProvenLinks
from jaxmorph.control.profiler import Profile
from jaxmorph.control.verdicts import Verdict, dead_links
from jaxmorph.records import Link, Routes
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.planner import Plan

_FIRST_WAIT_STEPS, _MOST_RETRIES = 4, 4

ChangedOps: TypeAlias = Mapping[tuple[int, OpKind], ComputeNotice]
"""Of the ops of each stage and kind that have changed, the latest notice."""


# --- Observations --------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepObserved:
    """A step of the plan in force, as rank 0 knows it from all ranks' reports.

    Attributes:
        ops: What the ops of each stage took, by kind.
        probes_ms: What the messages of probes before the step took, by the names of transfers.
    """

    step: int
    samples: tuple[LinkSample, ...] = ()
    ops: Mapping[tuple[int, OpKind], OpTime] = field(default_factory=dict)
    probes_ms: Mapping[str, float] = field(default_factory=dict)
    paths: PathNews = NO_NEWS


@dataclass(frozen=True)
class PlannerStarted:
    """The planning process knows the run and can be asked."""


@dataclass(frozen=True)
class PlansWeighed:
    """The answer to `WeighPlans`."""

    options: Options


@dataclass(frozen=True)
class ProgramsFetched:
    """The answer to `FetchPrograms`: every rank's instructions are ready."""


@dataclass(frozen=True)
class PlanningFailed:
    """The planning process has died, does not answer, or could not do what it was asked."""

    error: str


@dataclass(frozen=True)
class PlanChanged:
    """All ranks run the plan of the last `ChangePlan`, in every step observed from now on."""


Observation: TypeAlias = (
    StepObserved | PlannerStarted | PlansWeighed | ProgramsFetched | PlanningFailed | PlanChanged
)


# --- Commands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeighPlans:
    """Ask the planning process which plans there are.

    Attributes:
        restart: Whether to replace the process first: it has failed.
    """

    profile: Profile
    verdicts: tuple[Verdict, ...]
    held: tuple[Link, ...]
    restart: bool = False


@dataclass(frozen=True)
class FetchPrograms:
    """Have the planning process hand out the instructions of a plan that it offered last."""

    chosen: int


@dataclass(frozen=True)
class ProbeLinks:
    """Have ranks probe direct links after the next meeting.

    Attributes:
        restore: Those whose direct paths have failed, and begin again for the probe.
    """

    links: tuple[Link, ...]
    restore: frozenset[Link] = frozenset()


@dataclass(frozen=True)
class DropProbes:
    """Probes that no meeting has announced yet are no longer wanted."""


@dataclass(frozen=True)
class ChangePlan:
    """Have all ranks change to a plan after the next meeting.

    Attributes:
        restore: The links of the plan whose direct paths have failed, and begin again with it.
    """

    change: PlanChange
    restore: frozenset[Link] = frozenset()


Command: TypeAlias = WeighPlans | FetchPrograms | ProbeLinks | DropProbes | ChangePlan


# --- State ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Starting:
    """The planning process starts; news wait for it."""


@dataclass(frozen=True)
class Idle:
    """Nothing is being decided."""


@dataclass(frozen=True)
class Weighing:
    """`WeighPlans` waits for its answer.

    Attributes:
        step: The step observed last when it was asked.
        ops: The changed ops that are weighed.
        again: Whether the news that came during one answer are being weighed.
    """

    step: int
    profile: Profile
    verdicts: tuple[Verdict, ...]
    dwell: Dwell
    ops: ChangedOps
    again: bool = False


@dataclass(frozen=True)
class Probing:
    """A decision waits for probes of the direct links that it returns to."""

    situation: Situation
    decision: Decision
    ops: ChangedOps
    since_step: int


@dataclass(frozen=True)
class Preparing:
    """`FetchPrograms` waits for its answer."""

    situation: Situation
    decision: Decision
    ops: ChangedOps


@dataclass(frozen=True)
class Changing:
    """Ranks have been given a plan, or are about to be, and have not reported it in force."""

    change: PlanChange


@dataclass(frozen=True)
class GivenUp:
    """Planning has failed too often; the plan in force stays."""


Phase: TypeAlias = Starting | Idle | Weighing | Probing | Preparing | Changing | GivenUp


@dataclass(frozen=True)
class News:
    """What is known and has not been weighed.

    Attributes:
        are_due: Whether there is anything.
        ops: The ops that have changed.
        of_links: Whether more is known of links than was weighed last.
        turned_slow: Whether a link has turned slow, or failed, since plans were asked for last.
        weigh_at_step: When to weigh although nothing has changed.
    """

    are_due: bool = False
    ops: ChangedOps = field(default_factory=dict)
    of_links: bool = False
    turned_slow: bool = False
    weigh_at_step: float = math.inf


@dataclass(frozen=True)
class Retries:
    """The failures of planning in a row, and what follows from them.

    After the first one planning pauses for four steps, after each further one for twice as long;
    for four if a link turns slow meanwhile. A success ends the row. The fifth failure in a row is
    the last.
    """

    failures: int = 0
    not_before_step: int = 0
    not_before_step_if_slow: int = 0

    @property
    def are_over(self) -> bool:
        """Whether planning is given up."""
        return self.failures > _MOST_RETRIES

    def after_failure(self, step: int) -> "Retries":
        """The row with another failure."""
        wait_steps = _FIRST_WAIT_STEPS * 2**self.failures
        return Retries(self.failures + 1, step + wait_steps, step + _FIRST_WAIT_STEPS)

    def may_begin(self, step: int, *, turned_slow: bool) -> bool:
        """Whether plans may be asked for again."""
        return step >= (self.not_before_step_if_slow if turned_slow else self.not_before_step)

    def in_words(self, step: int) -> str:
        """What happens next, after a failure."""
        if self.are_over:
            return (
                f"that was attempt {self.failures} in a row: planning is given up, and the plan in "
                "force stays for the rest of the run"
            )
        wait_steps = self.not_before_step - step
        sooner = ", sooner if a link turns slow" if wait_steps > _FIRST_WAIT_STEPS else ""
        return f"the plan in force stays, and planning is tried again in {wait_steps} steps{sooner}"


@dataclass(frozen=True)
class ControllerState:
    """All that decisions depend on, beside the next observation.

    Attributes:
        adapts: Whether the run adapts; if not, only failures of direct paths are followed.
        usual: What healthy links do on either route.
        plan: The one in force.
        profile: What ops and links cost when the first plan was made, with ops as they are now.
        step: The step observed last.
        judged_routes: The routes under which links were judged last; None before any step.
        from_start: Events of links that are degraded before the first step.
        proven: Direct links that a probe has found healthy.
        must_restart: Whether the planning process has failed since it was asked last.
    """

    settings: Adaptation
    adapts: bool
    usual: UsualLinks
    plan: Plan
    profile: Profile
    detector: Detector
    compute: ComputeWatch
    paths: FailedPaths
    dwell: Dwell
    phase: Phase
    step: int = -1
    judged_routes: Routes | None = None
    from_start: tuple[ControlEvent, ...] = ()
    news: News = field(default_factory=News)
    proven: ProvenLinks = field(default_factory=ProvenLinks)
    retries: Retries = field(default_factory=Retries)
    must_restart: bool = False

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """On all directions of links that have been seen."""
        return tuple(self.detector.verdicts.values())


def with_settings(state: ControllerState, settings: Adaptation) -> ControllerState:
    """The same state under other settings, for a replay."""
    return replace(
        state,
        settings=settings,
        paths=replace(
            state.paths, steps=settings.failback_steps, most_steps=settings.longest_dwell_steps
        ),
        dwell=replace(
            state.dwell, least_steps=settings.dwell_steps, most_steps=settings.longest_dwell_steps
        ),
    )


@dataclass(frozen=True)
class Advance:
    """What follows from an observation."""

    state: ControllerState
    commands: tuple[Command, ...] = ()
    events: tuple[ControlEvent, ...] = ()


def first_state(
    settings: Adaptation,
    plan: Plan,
    planned_for: Profile,
    usual: UsualLinks,
    detector: Detector,
    *,
    adapts: bool = True,
) -> ControllerState:
    """The state before the first step, under the run's first plan."""
    verdicts = tuple(detector.verdicts.values())
    return ControllerState(
        settings=settings,
        adapts=adapts,
        usual=usual,
        plan=plan,
        profile=planned_for,
        detector=detector,
        compute=ComputeWatch(planned_for.costs),
        paths=FailedPaths.begin(
            dead_links(verdicts), settings.failback_steps, settings.longest_dwell_steps
        ),
        dwell=Dwell(settings.dwell_steps, settings.longest_dwell_steps),
        phase=Starting(),
        from_start=tuple(filter(None, (verdict_event(each, {}) for each in verdicts))),
    )
