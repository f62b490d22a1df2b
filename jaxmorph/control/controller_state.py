"""The controller's state, observations and commands: plain values for `controller.advance`.

Files in `control/` have the names of these classes and fields.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from jaxmorph.config.sections import Adaptation
from jaxmorph.control.compute_watch import ComputeNotice, ComputeWatch
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.detector import Detector
from jaxmorph.control.events import ControlEvent, PlanChange, verdict_events
from jaxmorph.control.handover import SlowLink
from jaxmorph.control.late_directions import LateDirections
from jaxmorph.control.link_state import FailedPaths
from jaxmorph.control.measurements import (
    MessageTables,
    OpTime,
    StepSamples,
    by_direction,
)
from jaxmorph.control.orchestrator import Decision, Dwell, Options, Situation
from jaxmorph.control.path_reports import JoinedPathReport
from jaxmorph.control.probes import ProvenLinks
from jaxmorph.control.profiler import Profile
from jaxmorph.control.verdicts import Verdict, dead_links
from jaxmorph.records import Link, Routes
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.planner import Plan

_FIRST_WAIT_STEPS, _LONGEST_WAIT_STEPS = 4, 64


# --- Observations --------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepObserved:
    """A step of the plan in force, by all ranks' reports.

    Attributes:
        probes_ms: The times of probe messages before the step, by the names of transfers.
        messages: Those of the step (`rank_times.joined_messages`).
    """

    step: int
    ops: Mapping[tuple[int, OpKind], OpTime] = field(default_factory=dict)
    probes_ms: Mapping[str, float] = field(default_factory=dict)
    paths: JoinedPathReport = field(default_factory=JoinedPathReport)
    messages: tuple[MessageTables, ...] = ()

    @cached_property
    def by_direction(self) -> StepSamples:
        """All samples."""
        return by_direction(self.messages)


@dataclass(frozen=True)
class PlannerStarted:
    """The planning process knows the run and can plan."""


@dataclass(frozen=True)
class CandidatesReceived:
    """The answer to `RequestCandidates`."""

    options: Options


@dataclass(frozen=True)
class CandidateChosen:
    """The answer to `ChooseCandidate`: every rank's instructions are here."""


@dataclass(frozen=True)
class PlanningFailed:
    """The planning process has died, does not answer, or could not serve a request."""

    error: str


@dataclass(frozen=True)
class PlanChanged:
    """All ranks run the plan of the last `ChangePlan` from the next observed step on."""


@dataclass(frozen=True)
class PlanWithdrawn:
    """The plan of the last `ChangePlan` was not announced, as `WithdrawPlan` asks."""


@dataclass(frozen=True)
class PlanDropped:
    """No rank runs the plan of the last `ChangePlan`: its links are in time again."""


Observation: TypeAlias = (
    StepObserved
    | SlowLink
    | PlannerStarted
    | CandidatesReceived
    | CandidateChosen
    | PlanningFailed
    | PlanChanged
    | PlanWithdrawn
    | PlanDropped
)


# --- Commands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestCandidates:
    """Request candidates from the planning process.

    Attributes:
        staying: Delegated links that can't go back yet.
        restart_planner: Whether to replace the process first, because it failed.
    """

    profile: Profile
    verdicts: tuple[Verdict, ...]
    staying: tuple[Link, ...]
    restart_planner: bool = False


@dataclass(frozen=True)
class ChooseCandidate:
    """Make one of the last candidates the plan in force of the planning process."""

    chosen: int


@dataclass(frozen=True)
class ProbeLinks:
    """Probe direct links after the next exchange.

    Attributes:
        restore: Those whose failed direct paths are restored for the probe.
    """

    links: tuple[Link, ...]
    restore: frozenset[Link] = frozenset()


@dataclass(frozen=True)
class RestorePaths:
    """Return links that were handed over to their direct paths after the next exchange."""

    restore: frozenset[Link]


@dataclass(frozen=True)
class DropProbes:
    """Cancel probes that no exchange has announced yet."""


@dataclass(frozen=True)
class ChangePlan:
    """Change to a plan on all ranks after the next exchange.

    Attributes:
        restore: The links whose direct paths are restored with it.
        late: If these are in time again by then, the change is dropped (`PlanDropped`).
    """

    change: PlanChange
    restore: frozenset[Link] = frozenset()
    late: LateDirections = field(default_factory=dict)


@dataclass(frozen=True)
class WithdrawPlan:
    """Take the last `ChangePlan` back, if no exchange has announced it yet."""


Command: TypeAlias = (
    RequestCandidates
    | ChooseCandidate
    | ProbeLinks
    | RestorePaths
    | DropProbes
    | ChangePlan
    | WithdrawPlan
)


# --- State ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Findings:
    """Findings since the last `RequestCandidates`.

    Attributes:
        is_due: Whether to request candidates for them.
        ops: The latest notice of each stage and kind of op that has changed.
        links_changed: Whether links have changed.
        turned_slow: Whether a link has turned slow or failed.
        request_at_step: When to request candidates even without findings.
    """

    is_due: bool = False
    ops: Mapping[tuple[int, OpKind], ComputeNotice] = field(default_factory=dict)
    links_changed: bool = False
    turned_slow: bool = False
    request_at_step: float = math.inf

    def with_earlier(self, earlier: "Findings") -> "Findings":
        """These findings, with those of a request that led to no plan."""
        return replace(
            self,
            is_due=True,
            ops={**earlier.ops, **self.ops},
            turned_slow=earlier.turned_slow or self.turned_slow,
        )


@dataclass(frozen=True)
class Starting:
    """The planning process is starting."""


@dataclass(frozen=True)
class Idle:
    """Nothing is being decided."""


@dataclass(frozen=True)
class AwaitingCandidates:
    """`RequestCandidates` waits for its answer.

    Attributes:
        step: The last observed step when it was sent.
        findings: Those that it includes.
        again: Whether it repeats a request, because links had changed since.
    """

    step: int
    profile: Profile
    verdicts: tuple[Verdict, ...]
    dwell: Dwell
    findings: Findings
    again: bool = False


@dataclass(frozen=True)
class Probing:
    """A decision waits for probes of the direct links that it returns to."""

    situation: Situation
    decision: Decision
    findings: Findings
    since_step: int


@dataclass(frozen=True)
class Preparing:
    """`ChooseCandidate` waits for its answer."""

    situation: Situation
    decision: Decision
    findings: Findings


@dataclass(frozen=True)
class Changing:
    """`ChangePlan` waits for its `PlanChanged`, `PlanDropped` or `PlanWithdrawn`.

    Attributes:
        dwell_before: The stays to restore if the change is dropped.
        findings: Those that led to it.
        slow: The links that its decision knew to be slow.
    """

    change: PlanChange
    dwell_before: Dwell
    findings: Findings = field(default_factory=Findings)
    slow: tuple[Link, ...] = ()


Phase: TypeAlias = Starting | Idle | AwaitingCandidates | Probing | Preparing | Changing


@dataclass(frozen=True)
class Retries:
    """The failures of planning in a row, and when to retry.

    The first failure delays the next try by 4 steps, the second by 8, and so on up to 64. If a
    link has turned slow or failed since, each of the first four failures delays it by 4 steps only.
    A decision resets the failures and the delay.
    """

    failures: int = 0
    not_before_step: int = 0
    not_before_step_if_slow: int = 0

    def after_failure(self, step: int) -> "Retries":
        """The retries after another failure."""
        wait_steps = min(_FIRST_WAIT_STEPS * 2**self.failures, _LONGEST_WAIT_STEPS)
        # Each retry starts a process: one that always fails must not compete with training.
        if_slow_steps = _FIRST_WAIT_STEPS if wait_steps < _LONGEST_WAIT_STEPS else wait_steps
        return Retries(self.failures + 1, step + wait_steps, step + if_slow_steps)

    def may_begin(self, step: int, *, turned_slow: bool) -> bool:
        """Whether planning may be retried."""
        return step >= self._retry_step(turned_slow)

    def in_words(self, step: int, *, turned_slow: bool) -> str:
        """The consequence of the last failure, for its event."""
        retry_step = self._retry_step(turned_slow)
        is_sooner_if_slow = self.not_before_step_if_slow < retry_step
        sooner = ", sooner if a link turns slow" if is_sooner_if_slow else ""
        wait_steps = retry_step - step
        return f"the plan in force stays, and planning is tried again in {wait_steps} steps{sooner}"

    def _retry_step(self, turned_slow: bool) -> int:
        return self.not_before_step_if_slow if turned_slow else self.not_before_step


@dataclass(frozen=True)
class ControllerState:
    """All that decisions depend on besides the next observation.

    Attributes:
        adapts: Whether the run adapts; if not, the controller only tracks failed direct paths.
        profile: The costs of the first plan, with ops as they are now.
        judged_routes: The routes under which links were judged last; None before any step.
        from_start: The events of links that are degraded before the first step.
        findings: Those since the last request for candidates.
        must_restart_planner: Whether the next request replaces the planning process.
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
    findings: Findings
    step: int = -1
    judged_routes: Routes | None = None
    from_start: tuple[ControlEvent, ...] = ()
    proven: ProvenLinks = field(default_factory=ProvenLinks)
    retries: Retries = field(default_factory=Retries)
    must_restart_planner: bool = False

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts on all directions that have been seen."""
        return tuple(self.detector.verdicts.values())


def with_settings(state: ControllerState, settings: Adaptation) -> ControllerState:
    """The state under other settings, for a replay."""
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
    """The outcome of an observation."""

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
        findings=Findings(),
        from_start=verdict_events(verdicts, {}),
    )
