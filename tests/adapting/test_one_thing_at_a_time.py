"""Whatever the loop's threads do meanwhile: one thing is weighed at a time, and nothing is lost."""

import threading

from adapting_run import CONFIG, FIRST

from jaxmorph.adapting.control_events import Morph
from jaxmorph.adapting.planning_client import PlanningError
from jaxmorph.control.orchestrator import Decision, Dwell
from jaxmorph.runtime.direct_probe import probe_transfers
from jaxmorph.schedule.costs import Link


class Beginning:
    """A planning process that takes its time to begin, and then has begun, or failed to."""

    def __init__(self, run, error=None):
        self._may_end, self._run, self._error = threading.Event(), run, error
        run.plans.may_answer.clear()  # steps don't wait for what is queued
        run.loop.begin(self._begin)

    def end(self):
        self._run.plans.may_answer.set()
        self._may_end.set()
        self._run.settle()

    def _begin(self):
        assert self._may_end.wait(30)
        if self._error is not None:
            raise self._error


def test_what_happens_while_planning_begins_is_weighed_once_it_has_begun(run):
    beginning = Beginning(run)
    run.steps(6)
    run.steps(2, slow_ms=40.0)
    assert run.plans.asked == 0
    beginning.end()
    run.settle()
    assert run.plans.asked == 1
    run.steps(2, slow_ms=40.0)
    assert run.delegated() == {"1-2"}
    assert run.plans.asked == 1


def test_what_happens_while_planning_fails_to_begin_is_weighed_with_the_next_attempt(run):
    beginning = Beginning(run, PlanningError("the planning process has died"))
    run.steps(6)
    run.steps(2, slow_ms=40.0)
    beginning.end()
    failed_after = run.step - 1
    run.steps(3, slow_ms=40.0)
    assert (run.plans.asked, len(run.of_kind("planning_failed"))) == (0, 1)
    run.steps(3, slow_ms=40.0)
    assert (run.plans.asked, run.plans.restarted) == (1, [FIRST.routes])
    assert run.of_kind("plan_changed") == [(failed_after + 5, "plan_changed", None)]


def test_that_a_plan_is_kept_replaces_no_morph_that_ranks_have_yet_to_be_told(run):
    pending = Morph(FIRST, ("a", "b", "c"), {}, "", {}, {})
    situation = run.loop._weigh(*run.loop._latest, ())
    run.loop._morph = pending
    run.loop._keep(Decision(None, "all is well"), situation)
    assert run.loop._is_busy
    assert run.loop.ready() is pending


def test_how_long_things_are_to_stand_is_changed_by_one_thread_at_a_time(run):
    unguarded = []

    class Guarded(Dwell):
        def after(self, subjects, step):
            if not run.loop._lock.locked():
                unguarded.append((subjects, step))
            return super().after(subjects, step)

    settings = CONFIG.adaptation
    run.loop._dwell = Guarded(settings.dwell_steps, settings.longest_dwell_steps)
    run.steps(6)
    run.steps(6, slow_ms=40.0)  # by the thread that decides
    run.direct_late_ms = 40.0
    run.steps(12)  # by the one that hears of probes
    assert run.of_kind("link_probed") != []
    assert isinstance(run.loop._dwell, Guarded)
    assert unguarded == []


def test_no_probe_is_sent_of_a_link_that_an_earlier_one_has_found_well(run):
    run.steps(6)
    run.steps(6, slow_ms=40.0)
    run.sends_probes = False
    run.steps(9)
    assert run.delegated() == {"1-2"}  # it waits for a probe
    run.probed = {str(each): 0.5 for each in probe_transfers(Link(1, 2))}  # of something earlier
    run.steps(1)
    assert run.routes == FIRST.routes
    assert run.loop.due_probes() == ()
