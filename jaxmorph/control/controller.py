"""Decides step by step how a run reacts to its links and ops: a reducer.

`advance(state, observation)` returns the next state, the commands to carry out and the events to
report. It uses no threads, clocks or files, so a run's decisions can be replayed from its
observations. `training/control_loop.py` carries the commands out and feeds the answers back as
observations. `controller_state` has the values.

Another process plans during training, so a decision goes through phases:

    Starting -> Idle -RequestCandidates-> AwaitingCandidates -ChooseCandidate-> Preparing
                 ^                                |                             ^     |
                 |                                +---ProbeLinks---> Probing ---+     | ChangePlan
                 |                                                                    v
                 +---------------------------------------------------------------- Changing

A label is the command sent. `Starting` and `Changing` end with an observation; `Probing` sends
`ChooseCandidate` when its probes are good.

There is one decision at a time; findings (changes of links or ops) during it wait for the next one,
with exceptions. A link that turns slow in mid-step (`SlowLink`) takes back a plan that no exchange
has announced (`WithdrawPlan`). If links change, `AwaitingCandidates` repeats its request once.
`Probing` returns to `Idle` if links change, if a probe is late, if there is any finding when
results come, or if results are missing for some steps. These also lead back to `Idle`: a decision
to keep the plan, a failure of the planning process, in `Preparing` a path of the chosen plan that
has failed meanwhile, and in `Changing` a change that ranks drop. An answer that the phase does not
wait for is ignored. The planning process also simulates steps, so it may fail in `Idle` too; it is
then replaced.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jaxmorph.control.compute_watch import ComputeNotice, updated_costs
from jaxmorph.control.conditions import links_under
from jaxmorph.control.controller_state import (
    Advance,
    AwaitingCandidates,
    CandidateChosen,
    CandidatesReceived,
    ChangePlan,
    Changing,
    ChooseCandidate,
    Command,
    ControllerState,
    DropProbes,
    Findings,
    Idle,
    Observation,
    PlanChanged,
    PlanDropped,
    PlannerStarted,
    PlanningFailed,
    PlanWithdrawn,
    Preparing,
    ProbeLinks,
    Probing,
    RequestCandidates,
    RestorePaths,
    Retries,
    Starting,
    StepObserved,
    WithdrawPlan,
)
from jaxmorph.control.events import (
    ControlEvent,
    PlanChange,
    change_events,
    describe_ops,
    describe_states,
    evidence_of,
    notice_event,
    verdict_events,
)
from jaxmorph.control.handover import SlowLink
from jaxmorph.control.late_directions import late_directions
from jaxmorph.control.link_state import FailedPaths, PathFailure, PathState, delegated_links
from jaxmorph.control.measurements import OpTime, StepSamples
from jaxmorph.control.orchestrator import (
    Decision,
    Dwell,
    Option,
    Options,
    Situation,
    changed_routes,
    decide,
    dwell_after,
    dwelling_links,
    is_forced,
)
from jaxmorph.control.path_reports import (
    JoinedPathReport,
    StepPaths,
    failure_event,
    judge_late_messages,
    judge_paths,
    read_paths,
)
from jaxmorph.control.probes import probe_results
from jaxmorph.control.profiler import Profile
from jaxmorph.records import EventKind, Link, Routes
from jaxmorph.schedule.ops import OpKind

_MAY_FAIL = Starting | Idle | AwaitingCandidates | Preparing
_STEPS_TO_CHANGE = 2  # a step is observed during the next one; the change follows that one
_PROBE_WAIT = 8  # steps, then a probe without a result counts as lost


def advance(state: ControllerState, observation: Observation) -> Advance:
    """The next state, with commands to carry out and events to report."""
    phase = state.phase
    match observation:
        case StepObserved():
            return _observe(state, observation)
        case SlowLink() if state.adapts:
            return _turn_slow(state, observation)
        case PlannerStarted() if isinstance(phase, Starting):
            return _request_if_due(replace(state, phase=Idle()))
        case CandidatesReceived(options) if isinstance(phase, AwaitingCandidates):
            return _decide(state, phase, options)
        case CandidateChosen() if isinstance(phase, Preparing):
            return _change(state, phase)
        case PlanningFailed(error) if isinstance(phase, _MAY_FAIL):
            return _retry_later(state, error)
        case PlanChanged() if isinstance(phase, Changing):
            dwell = replace(state.dwell, morphed_step=state.step + 1)
            state = replace(state, plan=phase.change.plan, phase=Idle(), dwell=dwell)
            return Advance(state, events=change_events(phase.change))
        case PlanWithdrawn() if isinstance(phase, Changing):
            return _request_if_due(_undone(state, phase.dwell_before, phase.findings))
        case PlanDropped() if isinstance(phase, Changing):
            return _drop_change(state, phase)
        case _:
            return Advance(state)


def _observe(state: ControllerState, seen: StepObserved) -> Advance:
    """Judge a step, and request candidates from the planning process if they are due."""
    paths, step_paths = paths_of_step(state, seen)
    state = replace(state, step=seen.step, paths=paths)
    events, commands = step_paths.events, ()
    if state.adapts:
        state, link_events = _judge_paths(state, seen.paths, step_paths.new)
        notices: tuple[ComputeNotice, ...] = ()
        # Steps in which a path fails are excluded: their timings include the stall.
        if not seen.paths.is_disturbed:
            state, measured, notices = _measure(state, step_paths.samples, seen.ops)
            link_events += measured
        link_events = state.from_start + link_events
        state = _record_findings(state, link_events, notices, failed=bool(step_paths.new))
        state, probe_events, after_probes = _judge_probes(state, seen.probes_ms)
        request = _request_if_due(state)
        state, commands = request.state, after_probes + request.commands
        commands += _returning(state, seen.paths.restored)
        events += link_events + tuple(map(notice_event, notices)) + probe_events
    return Advance(replace(state, paths=state.paths.restore(seen.paths.restored)), commands, events)


def _turn_slow(state: ControllerState, seen: SlowLink) -> Advance:
    """Request candidates at once, so that the next step may run another plan."""
    paths, new = state.paths.record(() if seen.left is None else [seen.left])
    detector, found = judge_late_messages(
        state.detector, state.step + 1, seen.link, seen.late_ms, is_direct=seen.left is not None
    )
    if not (new or found):  # it is known already
        return Advance(state)
    events = (*state.from_start, *map(failure_event, new), *found)
    state = replace(state, paths=paths, detector=detector)
    state = _record_findings(state, events, (), failed=bool(new))
    if isinstance(state.phase, Changing):
        is_new = seen.link not in state.phase.slow
        return Advance(state, (WithdrawPlan(),) if is_new else (), events)
    return replace(_request_if_due(state), events=events)


def _judge_paths(
    state: ControllerState, report: JoinedPathReport, new: Sequence[PathFailure]
) -> tuple[ControllerState, tuple[ControlEvent, ...]]:
    routes = state.plan.routes
    paths, detector, events = judge_paths(
        state.paths, state.detector, state.step, report, new, routes
    )
    failed = [failure.link for failure in new]
    # A link that the plan delegates can only have failed in a probe. That counts as a change of its
    # route, so that the next attempt waits longer.
    probed = [link for link in failed if routes.get(link) == "delegated"]
    proven, dwell = state.proven.without(failed), state.dwell.after(probed, state.step)
    state = replace(state, paths=paths, detector=detector, proven=proven, dwell=dwell)
    return state, tuple(events)


def _measure(
    state: ControllerState,
    samples: StepSamples,
    ops: Mapping[tuple[int, OpKind], OpTime],
) -> tuple[ControllerState, tuple[ControlEvent, ...], tuple[ComputeNotice, ...]]:
    """Judge links and ops by their times."""
    before = state.detector.verdicts
    detector, changed = state.detector.observe(state.step, samples)
    compute, notices = state.compute.observe(state.step, ops)
    profile = replace(state.profile, costs=updated_costs(state.profile.costs, notices))
    judged_routes = state.plan.routes
    state = replace(
        state, detector=detector, compute=compute, profile=profile, judged_routes=judged_routes
    )
    return state, verdict_events(changed, before), tuple(notices)


def _record_findings(
    state: ControllerState,
    link_events: Iterable[ControlEvent],
    notices: Sequence[ComputeNotice],
    *,
    failed: bool,
) -> ControllerState:
    """Add a step's changes of links and ops to the findings."""
    # A link that begins to recover is no finding: the recovery may not last.
    kinds = {event.kind for event in link_events} - {EventKind.STRAGGLER_RECOVERING}
    findings = state.findings
    findings = replace(
        findings,
        is_due=findings.is_due or failed or bool(kinds) or bool(notices),
        ops={**findings.ops, **{(each.stage, each.kind): each for each in notices}},
        links_changed=findings.links_changed or failed or bool(kinds),
        turned_slow=findings.turned_slow or failed or EventKind.STRAGGLER_DETECTED in kinds,
    )
    return replace(state, findings=findings, from_start=())


def _judge_probes(
    state: ControllerState, probes_ms: Mapping[str, float]
) -> tuple[ControllerState, tuple[ControlEvent, ...], tuple[Command, ...]]:
    """Carry out the decision that waits for probes, or return to `Idle`."""
    results = probe_results(probes_ms, state.detector, state.paths.unrestored)
    dwell = state.dwell.after(results.late, state.step)
    proven = state.proven.record(results, state.step)
    state, events, phase = replace(state, dwell=dwell, proven=proven), results.events(), state.phase
    if not isinstance(phase, Probing):
        return state, events, ()
    if state.findings.links_changed or (probes_ms and (results.late or state.findings.is_due)):
        return _drop_probes(state, phase), events, (DropProbes(),)
    if not state.proven.unproven(phase.situation, phase.decision):
        prepared = _prepare(state, phase.situation, phase.decision, phase.findings)
        return prepared.state, events, (DropProbes(), *prepared.commands)
    if state.step - phase.since_step >= _PROBE_WAIT:
        return _drop_probes(state, phase), events, (DropProbes(),)
    return state, events, ()


def _drop_probes(state: ControllerState, phase: Probing) -> ControllerState:
    """Return to `Idle`, with the findings that the waiting decision included."""
    return replace(state, phase=Idle(), findings=state.findings.with_earlier(phase.findings))


def _request_if_due(state: ControllerState) -> Advance:
    """Request candidates if they are due and no decision is in progress.

    Until a step of the plan in force has been measured, verdicts have the times of other routes,
    so a request waits. Even a failed path can wait: its messages are delegated already.
    """
    if state.judged_routes not in (None, state.plan.routes):
        return Advance(state)
    findings = state.findings
    may_begin = state.retries.may_begin(state.step, turned_slow=findings.turned_slow)
    is_due = findings.is_due or state.step >= findings.request_at_step
    if not (isinstance(state.phase, Idle) and may_begin and is_due):
        return Advance(state)
    return _request(state, findings)


def _request(state: ControllerState, findings: Findings, *, again: bool = False) -> Advance:
    """Request candidates under the current verdicts and costs, and clear the findings."""
    from_step = state.step + _STEPS_TO_CHANGE
    staying = tuple(sorted(dwelling_links(state.dwell, state.plan.routes, from_step)))
    verdicts = state.verdicts
    phase = AwaitingCandidates(state.step, state.profile, verdicts, state.dwell, findings, again)
    command = RequestCandidates(
        state.profile, verdicts, staying, restart_planner=state.must_restart_planner
    )
    state = replace(state, phase=phase, findings=Findings(), must_restart_planner=False)
    return Advance(state, (command,))


def _decide(state: ControllerState, asked: AwaitingCandidates, options: Options) -> Advance:
    """Decide, but repeat the request once if links have changed since, or are in time again."""
    late = late_directions(each for each in asked.verdicts if each.step >= asked.step)
    has_calmed = any(not state.detector.verdicts[each].is_slow for each in late)
    if (state.findings.links_changed or has_calmed) and not asked.again:
        return _request(state, state.findings.with_earlier(asked.findings), again=True)
    situation = Situation(
        step=asked.step + _STEPS_TO_CHANGE,
        verdicts=asked.verdicts,
        in_force=Option(state.plan, options.in_force_ms),
        candidates=options.candidates,
        undisturbed_ms=options.undisturbed_ms,
        dwell=asked.dwell,
        worth=state.settings.worth,
        may_delegate_healthy=state.settings.delegates == "any",
        other_changes=describe_ops(asked.findings.ops),
    )
    decision = decide(situation)
    if decision.wait_steps:
        request_at_step = asked.step + decision.wait_steps
        state = replace(state, findings=replace(state.findings, request_at_step=request_at_step))
    if decision.chosen is None:
        evidence = evidence_of(situation, situation.in_force)
        kept = ControlEvent(EventKind.PLAN_KEPT, decision.reason, evidence=evidence)
        return Advance(replace(state, phase=Idle(), retries=Retries()), events=(kept,))
    if unproven := state.proven.unproven(situation, decision):
        probing = Probing(situation, decision, asked.findings, state.step)
        restore = state.paths.unrestored.intersection(unproven)
        return Advance(replace(state, phase=probing), (ProbeLinks(unproven, restore),))
    return _prepare(state, situation, decision, asked.findings)


def _prepare(
    state: ControllerState, situation: Situation, decision: Decision, findings: Findings
) -> Advance:
    preparing = Preparing(situation, decision, findings)
    return Advance(replace(state, phase=preparing), (ChooseCandidate(decision.chosen or 0),))


def _change(state: ControllerState, prepared: Preparing) -> Advance:
    situation, reason = prepared.situation, prepared.decision.reason
    now, then = situation.in_force, situation.candidates[prepared.decision.chosen or 0]
    known, slow = (
        {each.link for each in verdicts if each.is_slow}
        for verdicts in (situation.verdicts, state.verdicts)
    )
    if _uses_failed_path(state, then.routes) or state.paths.handed_over & slow - known:
        # A path has failed, or a link was handed over, since the decision.
        return _request_if_due(_undone(state, state.dwell, prepared.findings))
    change = PlanChange(
        plan=replace(then.plan, predicted_step_s=then.step_ms / 1e3, reason=reason),
        reason=reason,
        routes=changed_routes(now.routes, then.routes),
        evidence=evidence_of(situation, then),
    )
    direct = {link for link, route in change.routes.items() if route == "direct"}
    back = direct | (state.paths.handed_over - delegated_links(then.routes))
    is_for_slow_links = not (direct or is_forced(situation) or situation.other_changes)
    newly = delegated_links(change.routes) & known
    last_step = situation.step - _STEPS_TO_CHANGE
    late = late_directions(
        each
        for each in situation.verdicts
        if (each.link in newly if newly else each.step >= last_step)
    )
    restored = state.paths.unrestored & back
    command = ChangePlan(change, restored, late if is_for_slow_links else {})
    changing = Changing(change, state.dwell, prepared.findings, tuple(sorted(known)))
    dwell = dwell_after(state.dwell, now, then, situation.step)
    return Advance(replace(state, phase=changing, dwell=dwell, retries=Retries()), (command,))


def _drop_change(state: ControllerState, dropped: Changing) -> Advance:
    """Keep the plan in force, and request candidates again after the next step."""
    change = dropped.change
    detail = f"its links are in time again, so the plan in force stays: {change.reason}"
    evidence = {**change.evidence, "to": change.evidence["from"]}
    kept = ControlEvent(EventKind.PLAN_KEPT, detail, evidence=evidence)
    return Advance(_undone(state, dropped.dwell_before, Findings()), events=(kept,))


def _undone(state: ControllerState, dwell: Dwell, findings: Findings) -> ControllerState:
    """The state as if no candidate had been chosen, with the findings that led to the choice.

    `ChooseCandidate` has made the chosen one the planning process's plan in force. A new process
    undoes that.
    """
    return replace(
        state,
        phase=Idle(),
        dwell=dwell,
        findings=state.findings.with_earlier(findings),
        must_restart_planner=True,
    )


def _returning(state: ControllerState, restored: Iterable[Link]) -> tuple[Command, ...]:
    """Return links that were handed over, if the plan in force stays and has them direct.

    They wait while the plan has only just begun: the next one may delegate them.

    Args:
        restored: The links that have returned after this step.
    """
    waits = state.dwell.rests(state.step + _STEPS_TO_CHANGE)
    is_decided = isinstance(state.phase, Idle) and not (state.findings.is_due or waits)
    links = state.paths.handed_over - delegated_links(state.plan.routes) - {*restored}
    return (RestorePaths(links),) if is_decided and links else ()


def _uses_failed_path(state: ControllerState, routes: Routes) -> bool:
    """Whether a plan sends on a direct path that has failed and not returned."""
    failed = {link for link, at in state.paths.links.items() if at.state is PathState.FAILED}
    return not failed - state.paths.handed_over <= delegated_links(routes)


def _retry_later(state: ControllerState, error: str) -> Advance:
    """Return to `Idle`, with the findings of the request that failed."""
    retries = state.retries.after_failure(state.step)
    phase = state.phase
    asked = phase.findings if isinstance(phase, AwaitingCandidates | Preparing) else Findings()
    findings = state.findings.with_earlier(asked)  # due even if empty: to restart the process
    state = replace(
        state, phase=Idle(), retries=retries, findings=findings, must_restart_planner=True
    )
    detail = f"{error}; {retries.in_words(state.step, turned_slow=findings.turned_slow)}"
    return Advance(state, events=(ControlEvent(EventKind.PLANNING_FAILED, detail),))


def paths_of_step(state: ControllerState, seen: StepObserved) -> tuple[FailedPaths, StepPaths]:
    """The direct paths of a step; see `read_paths`."""
    return read_paths(state.paths, seen.paths, seen.by_direction, state.plan.routes)


def expected_profile(state: ControllerState, profile: Profile) -> Profile:
    """A profile with links as they were judged last, for predictions of the plan in force."""
    if state.judged_routes is None:
        return profile
    routes = state.judged_routes, state.plan.routes
    judged = links_under(state.verdicts, state.usual, *routes, margin_of_jitter=0.0)
    has_verdict = {each.link for each in state.verdicts}
    links = {link: at for link, at in judged.items() if link in has_verdict}
    return replace(profile, links={**profile.links, **links})


def link_states(state: ControllerState) -> dict[str, str]:
    """The links that are not healthy, for the terminal."""
    return {**state.paths.in_words(), **describe_states(state.verdicts)}
