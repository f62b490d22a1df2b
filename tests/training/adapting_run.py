"""A run of three stages under a loop that may change its plan; plans are made in this process."""

import threading
from dataclasses import replace

from jaxmorph.config import Config
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.controller import expected_profile
from jaxmorph.control.controller_state import ProbeLinks, StepObserved, first_state
from jaxmorph.control.detector import Detector
from jaxmorph.control.profiler import Profile
from jaxmorph.control.rank_times import joined_messages, op_times_of, rank_times
from jaxmorph.control.step_programs import lower_step
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.instructions import parse_instructions
from jaxmorph.records import Link
from jaxmorph.runtime.direct_probe import probe_transfers
from jaxmorph.schedule.costs import LinkDelay, StageCosts, chain_links
from jaxmorph.training.control_loop import ControlLoop, Morph
from jaxmorph.training.plan_in_force import plan_step
from jaxmorph.training.planning_client import Begin, PlanningError, RunToPlan
from jaxmorph.training.planning_process import CandidatePlanner

_ANSWERS = 4  # of the planning process, one after another, until a plan is ready
COSTS = StageCosts.uniform(3, 10.0, 10.0, 10.0)
USUAL: UsualLinks = {"direct": chain_links((0.5, 0.5)), "delegated": chain_links((1.5, 1.5))}
SIZES = {"parallelism": {"stages": 3}, "batch": {"microbatches": 8}, "schedule": {"name": "zb-h2"}}
CONFIG = Config.model_validate({**SIZES, "adaptation": {"enabled": True}})
PLANNED_FOR = Profile(COSTS, USUAL["direct"])
FIRST = plan_step(CONFIG, PLANNED_FOR)


class PlansHere:
    """Plans in this process, as the planning process does."""

    def __init__(self, usual=USUAL, home=FIRST, in_force=None, config=CONFIG, *, may_answer=True):
        self._run = RunToPlan(config, 0, home, PLANNED_FOR, usual)
        self._planner = CandidatePlanner(Begin(self._run, in_force or home))
        self.may_answer, self.is_asked = threading.Event(), threading.Event()
        if may_answer:
            self.may_answer.set()
        self.asked, self.simulated, self.restarted, self.options = 0, 0, [], []
        self.asked_with, self.has_died = (), False

    def make_candidates(self, profile, verdicts, staying):
        self.asked += 1
        self.asked_with = profile, verdicts, staying
        self.is_asked.set()
        assert self.may_answer.wait(30)
        self.options.append(self._planner.make_candidates(profile, verdicts, staying))
        return self.options[-1]

    def choose(self, chosen, number):
        return self._planner.choose(chosen, number)

    def simulate(self, number, profile, *, with_times=False):
        if self.has_died:
            raise PlanningError("the planning process has died")
        self.simulated += 1
        try:
            return self._planner.simulate(number, profile, with_times=with_times)
        except ValueError as error:
            raise PlanningError(str(error)) from error

    def restart(self, in_force, programs, number):
        self.restarted.append(in_force.routes)
        self.has_died = False
        self._planner = CandidatePlanner(Begin(self._run, in_force, programs, number))


class FailingPlans(PlansHere):
    """Plans whose requests with some numbers fail."""

    def __init__(self, *failing, config=CONFIG):
        super().__init__(config=config)
        self.failing = failing

    def make_candidates(self, profile, verdicts, staying):
        if self.asked in self.failing:
            self.asked += 1
            raise PlanningError("the planning process has died")
        return super().make_candidates(profile, verdicts, staying)


class Run:
    """A run whose steps last what the simulator says.

    `direct_late_ms` is what a probe of a direct link takes beyond the usual; probes are sent as
    long as `sends_probes`.
    """

    def __init__(
        self,
        plans,
        settings=CONFIG.adaptation,
        in_force=FIRST,
        usual=USUAL,
        detector=None,
        start=lambda: None,
        keep=None,
    ):
        self.plans = plans
        state = first_state(settings, in_force, PLANNED_FOR, usual, detector or Detector())
        self.loop = ControlLoop(state, plans, keep)
        self.loop.start(start)
        self.settle()
        self.programs = lower_step(in_force.schedule, PLANNED_FOR, in_force.routes)
        self.routes, self.step, self.events, self.details = in_force.routes, 0, [], []
        self.morphs = []
        self.probed, self.direct_late_ms, self.sends_probes = {}, 0.0, True

    def steps(self, count, slow_ms=0.0, costs=COSTS, other_ms=0.0):
        """Some steps with a delay in direction 1>2, and another one on 0>1."""
        for _ in range(count):
            links = {Link(0, 1): self._state(0, other_ms), Link(1, 2): self._state(1, slow_ms)}
            timeline = simulate_blocking(self.programs, costs, links)
            ranks = rank_times(timeline)
            seen = StepObserved(
                self.step, op_times_of(ranks), self.probed, messages=joined_messages(ranks)
            )
            self._record(self.loop.observe(seen), self.step)
            self.settle()
            self._swap()
            self.step += 1

    def settle(self):
        """Wait until all requests are answered."""
        if self.plans.may_answer.is_set():
            for _ in range(_ANSWERS):
                self.loop._planner.submit(lambda: None).result(30)

    def expected_ms(self):
        profile = expected_profile(self.loop.state, PLANNED_FOR)
        return profile.links[Link(1, 2)].forward_latency_ms

    def delegated(self):
        return {str(link) for link, route in self.routes.items() if route == "delegated"}

    def of_kind(self, *kinds):
        return [event for event in self.events if event[1] in kinds]

    def _state(self, lower, delay_ms) -> LinkDelay:
        link = Link(lower, lower + 1)
        usual = USUAL[self.routes[link]][link]
        return replace(usual, forward_latency_ms=usual.forward_latency_ms + delay_ms)

    def _swap(self):
        took_ms = 0.5 + self.direct_late_ms
        self.probed = {}
        if isinstance(self.loop._due, ProbeLinks) and not self.sends_probes:
            return
        match self.loop.take_due():
            case ProbeLinks(links):
                probes = [each for link in links for each in probe_transfers(link)]
                self.probed = {str(transfer): took_ms for transfer in probes}
            case Morph() as morph:
                self.morphs.append(morph)
                self.programs = tuple(map(parse_instructions, morph.chosen.programs))
                self.routes = morph.plan.routes
                self._record(self.loop.plan_changed(morph), self.step + 1)

    def _record(self, events, step):
        self.events += [(step, event.kind, event.link) for event in events]
        self.details += [event.detail for event in events]
