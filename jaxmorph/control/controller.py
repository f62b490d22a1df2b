"""Decides step by step how a run reacts to its links and ops: a reducer.

`advance(state, observation)` returns the next state, the commands to carry out and the events to
report. It uses no threads, clocks or files, so a run's decisions can be replayed from its
observations. `training/control_loop.py` carries the commands out and feeds the answers back as
observations. `controller_state` has the values.

Another process plans beside training, so a decision goes through phases:

    Starting -> Idle -WeighPlans-> Weighing -FetchPrograms-> Preparing -ChangePlan-> Changing
                 ^                    |                         ^                       |
                 |                    +-ProbeLinks-> Probing ---+                       |
                 +----------------------------------------------------------------------+

There is one decision at a time; findings during it wait for the next one. News of links repeat
`Weighing` once and end `Probing`, which also ends with a late probe, or without results after some
steps. A decision to keep the plan, and a failure of the planning process, lead back to `Idle`; too
many failures in a row lead to `GivenUp`. An answer that the phase does not wait for is ignored.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jaxmorph.control.compute_watch import ComputeNotice, updated_costs
from jaxmorph.control.conditions import links_under
from jaxmorph.control.controller_state import (
    Advance,
    ChangePlan,
    Changing,
    Command,
    ControllerState,
    DropProbes,
    FetchPrograms,
    GivenUp,
    Idle,
    News,
    Observation,
    PlanChanged,
    PlannerStarted,
    PlanningFailed,
    PlansWeighed,
    Preparing,
    ProbeLinks,
    Probing,
    ProgramsFetched,
    Retries,
    Starting,
    StepObserved,
    Weighing,
    WeighPlans,
)
from jaxmorph.control.events import (
    ControlEvent,
    PlanChange,
    change_events,
    describe_ops,
    describe_states,
    evidence_of,
    notice_event,
    verdict_event,
)
from jaxmorph.control.link_state import FailedPaths, PathState
from jaxmorph.control.measurements import LinkSample, OpTime
from jaxmorph.control.orchestrator import (
    Decision,
    Option,
    Options,
    Situation,
    changed_routes,
    decide,
    dwell_after,
    dwelling_links,
)
from jaxmorph.control.path_reports import PathNews, PathsOfStep, judge_paths, read_paths
from jaxmorph.control.probes import probe_results
from jaxmorph.control.profiler import Profile
from jaxmorph.records import EventKind, Routes
from jaxmorph.schedule.ops import OpKind

_STEPS_TO_CHANGE = 2  # a step is observed during the next one; the change follows that one
_PROBE_WAIT = 8  # steps, then a probe without a result counts as lost


def advance(state: ControllerState, observation: Observation) -> Advance:
    """The next state, with commands to carry out and events to report."""
    phase = state.phase
    match observation:
        case StepObserved():
            return _observe(state, observation)
        case PlannerStarted() if isinstance(phase, Starting):
            return _weigh_if_due(replace(state, phase=Idle()))
        case PlansWeighed(options) if isinstance(phase, Weighing):
            return _weighed(state, phase, options)
        case ProgramsFetched() if isinstance(phase, Preparing):
            return _change(state, phase)
        case PlanningFailed(error) if isinstance(phase, Starting | Weighing | Preparing):
            return _retry_later(state, error)
        case PlanChanged() if isinstance(phase, Changing):
            plan = phase.change.plan
            return Advance(
                replace(state, plan=plan, phase=Idle()), events=change_events(phase.change)
            )
        case _:
            return Advance(state)


def _observe(state: ControllerState, seen: StepObserved) -> Advance:
    """Judge a step, and ask the planning process for plans if there is reason to."""
    paths, of_step = paths_of_step(state, seen)
    state = replace(state, step=seen.step, paths=paths)
    events, commands = of_step.events, ()
    if state.adapts:
        state, of_links = _judge_paths(state, of_step.news)
        notices: tuple[ComputeNotice, ...] = ()
        # Steps in which a path fails are excluded: their timings include the stall.
        if not of_step.news.is_disturbed:
            state, measured, notices = _measure(state, of_step.samples, seen.ops)
            of_links += measured
        of_links = state.from_start + of_links
        state = _record_news(state, of_links, notices, failed=bool(of_step.news.failures))
        state, of_probes, answer = _judge_probes(state, seen.probes_ms)
        asked = _weigh_if_due(state)
        state, commands = asked.state, answer + asked.commands
        events += of_links + tuple(map(notice_event, notices)) + of_probes
    return Advance(
        replace(state, paths=state.paths.restore(of_step.news.restored)), commands, events
    )


def _judge_paths(
    state: ControllerState, news: PathNews
) -> tuple[ControllerState, tuple[ControlEvent, ...]]:
    routes = state.plan.routes
    paths, detector, events = judge_paths(state.paths, state.detector, state.step, news, routes)
    failed = [failure.link for failure in news.failures]
    # A link that the plan delegates can only have failed in a probe. That counts as a change of its
    # route, so that the next attempt waits longer.
    probed = [link for link in failed if routes.get(link) == "delegated"]
    proven, dwell = state.proven.without(failed), state.dwell.after(probed, state.step)
    state = replace(state, paths=paths, detector=detector, proven=proven, dwell=dwell)
    return state, tuple(events)


def _measure(
    state: ControllerState,
    samples: Sequence[LinkSample],
    ops: Mapping[tuple[int, OpKind], OpTime],
) -> tuple[ControllerState, tuple[ControlEvent, ...], tuple[ComputeNotice, ...]]:
    """Judge links and ops by their times."""
    before = state.detector.verdicts
    detector, changed = state.detector.observe(state.step, samples)
    compute, notices = state.compute.observe(state.step, ops)
    profile = replace(state.profile, costs=updated_costs(state.profile.costs, notices))
    state = replace(state, detector=detector, compute=compute, profile=profile)
    events = filter(None, (verdict_event(each, before) for each in changed))
    return state, tuple(events), tuple(notices)


def _record_news(
    state: ControllerState,
    of_links: Iterable[ControlEvent],
    notices: Sequence[ComputeNotice],
    *,
    failed: bool,
) -> ControllerState:
    """Add findings to the news."""
    # A link that begins to recover is no news: the recovery may not last.
    kinds = {event.kind for event in of_links} - {EventKind.STRAGGLER_RECOVERING}
    news = state.news
    news = replace(
        news,
        are_due=news.are_due or failed or bool(kinds) or bool(notices),
        ops={**news.ops, **{(each.stage, each.kind): each for each in notices}},
        of_links=news.of_links or failed or bool(kinds),
        turned_slow=news.turned_slow or failed or EventKind.STRAGGLER_DETECTED in kinds,
    )
    return replace(state, news=news, judged_routes=state.plan.routes, from_start=())


def _judge_probes(
    state: ControllerState, probes_ms: Mapping[str, float]
) -> tuple[ControllerState, tuple[ControlEvent, ...], tuple[Command, ...]]:
    """Carry out the decision that waits for probes, or return to `Idle`."""
    results = probe_results(probes_ms, state.detector, state.paths.failed)
    dwell = state.dwell.after(results.late, state.step)
    proven = state.proven.record(results, state.step)
    state, events, phase = replace(state, dwell=dwell, proven=proven), results.events(), state.phase
    if not isinstance(phase, Probing):
        return state, events, ()
    if state.news.of_links or (probes_ms and (results.late or state.news.are_due)):
        return _drop_probes(state, phase), events, (DropProbes(),)
    if not state.proven.unproven(phase.situation, phase.decision):
        prepared = _prepare(state, phase.situation, phase.decision, phase.news)
        return prepared.state, events, (DropProbes(), *prepared.commands)
    if state.step - phase.since_step >= _PROBE_WAIT:
        return _drop_probes(state, phase), events, (DropProbes(),)
    return state, events, ()


def _drop_probes(state: ControllerState, phase: Probing) -> ControllerState:
    """Return to `Idle`, with the waiting decision as news."""
    return replace(state, phase=Idle(), news=state.news.with_earlier(phase.news))


def _weigh_if_due(state: ControllerState) -> Advance:
    """Ask for plans if there is reason to, and no decision is under way."""
    news = state.news
    may_begin = state.retries.may_begin(state.step, turned_slow=news.turned_slow)
    is_due = news.are_due or state.step >= news.weigh_at_step
    if not (isinstance(state.phase, Idle) and may_begin and is_due):
        return Advance(state)
    return _ask(state, news)


def _ask(state: ControllerState, news: News, *, again: bool = False) -> Advance:
    """Ask for plans under the current verdicts and costs, and clear the news."""
    from_step = state.step + _STEPS_TO_CHANGE
    staying = tuple(sorted(dwelling_links(state.dwell, state.plan.routes, from_step)))
    verdicts = state.verdicts
    asked = Weighing(state.step, state.profile, verdicts, state.dwell, news, again)
    command = WeighPlans(state.profile, verdicts, staying, restart=state.must_restart)
    state = replace(state, phase=asked, news=News(), must_restart=False)
    return Advance(state, (command,))


def _weighed(state: ControllerState, asked: Weighing, options: Options) -> Advance:
    """Decide, but ask once more if links have changed since the request."""
    if state.news.of_links and not asked.again:
        return _ask(state, state.news.with_earlier(asked.news), again=True)
    situation = Situation(
        step=asked.step + _STEPS_TO_CHANGE,
        verdicts=asked.verdicts,
        in_force=Option(state.plan, options.in_force_ms),
        candidates=options.candidates,
        undisturbed_ms=options.undisturbed_ms,
        dwell=asked.dwell,
        worth=state.settings.worth,
        may_delegate_healthy=state.settings.delegates == "any",
        news=describe_ops(asked.news.ops),
    )
    decision = decide(situation)
    if decision.wait_steps:
        weigh_at_step = asked.step + decision.wait_steps
        state = replace(state, news=replace(state.news, weigh_at_step=weigh_at_step))
    if decision.chosen is None:
        evidence = evidence_of(situation, situation.in_force)
        kept = ControlEvent(EventKind.PLAN_KEPT, decision.reason, evidence=evidence)
        return Advance(replace(state, phase=Idle(), retries=Retries()), events=(kept,))
    if unproven := state.proven.unproven(situation, decision):
        probing = Probing(situation, decision, asked.news, state.step)
        restore = state.paths.failed.intersection(unproven)
        return Advance(replace(state, phase=probing), (ProbeLinks(unproven, restore),))
    return _prepare(state, situation, decision, asked.news)


def _prepare(
    state: ControllerState, situation: Situation, decision: Decision, news: News
) -> Advance:
    preparing = Preparing(situation, decision, news)
    return Advance(replace(state, phase=preparing), (FetchPrograms(decision.chosen or 0),))


def _change(state: ControllerState, prepared: Preparing) -> Advance:
    situation, reason = prepared.situation, prepared.decision.reason
    now, then = situation.in_force, situation.candidates[prepared.decision.chosen or 0]
    if _uses_failed_path(state, then.routes):
        # A path has failed since the decision. `FetchPrograms` has made this plan the planning
        # process's plan in force; another process undoes that.
        news = state.news.with_earlier(prepared.news)
        return _weigh_if_due(replace(state, phase=Idle(), news=news, must_restart=True))
    change = PlanChange(
        plan=replace(then.plan, predicted_step_s=then.step_ms / 1e3, reason=reason),
        reason=reason,
        routes=changed_routes(now.routes, then.routes),
        evidence=evidence_of(situation, then),
    )
    direct = (link for link, route in change.routes.items() if route == "direct")
    command = ChangePlan(change, state.paths.failed.intersection(direct))
    dwell = dwell_after(state.dwell, now, then, situation.step)
    return Advance(
        replace(state, phase=Changing(change), dwell=dwell, retries=Retries()), (command,)
    )


def _uses_failed_path(state: ControllerState, routes: Routes) -> bool:
    """Whether a plan sends on a direct path that has failed and not returned."""
    links = state.paths.links
    return any(
        links[link].state is PathState.FAILED and routes.get(link, "direct") == "direct"
        for link in links
    )


def _retry_later(state: ControllerState, error: str) -> Advance:
    """Retry after some steps, or give up."""
    retries = state.retries.after_failure(state.step)
    asked = state.phase.news if isinstance(state.phase, Weighing | Preparing) else News()
    news = state.news.with_earlier(asked)  # due, if only to restart the process
    phase = GivenUp() if retries.are_over else Idle()
    state = replace(state, phase=phase, retries=retries, news=news, must_restart=True)
    detail = f"{error}; {retries.in_words(state.step, turned_slow=news.turned_slow)}"
    return Advance(state, events=(ControlEvent(EventKind.PLANNING_FAILED, detail),))


def paths_of_step(state: ControllerState, seen: StepObserved) -> tuple[FailedPaths, PathsOfStep]:
    """The direct paths of a step; see `read_paths`."""
    return read_paths(state.paths, seen.paths, seen.samples, state.plan.routes)


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
