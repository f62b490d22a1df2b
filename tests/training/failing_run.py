"""A run of three stages whose direct paths fail and return, on all of its ranks.

Links are simulated; reports, decisions and records are those of the program.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from adapting_run import CONFIG, COSTS, FIRST, PLANNED_FOR, USUAL, PlansHere

from jaxmorph.control.controller_state import first_state
from jaxmorph.control.detector import Detector
from jaxmorph.control.handover import EndWatch, SlowLink, late_in_words
from jaxmorph.control.link_state import PathFailure, directions_of
from jaxmorph.control.profiler import Profiler
from jaxmorph.control.step_programs import lower_step
from jaxmorph.messages import EventEmitted, StepDone
from jaxmorph.plain_json import dump
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.program.instructions import Transfer
from jaxmorph.records import Link
from jaxmorph.runtime.direct_probe import probe_transfers
from jaxmorph.runtime.queue import Stamp
from jaxmorph.runtime.rendezvous import DETAIL
from jaxmorph.runtime.report import (
    StepReport,
    StepTimings,
    StepTotals,
    addressed_parts,
    named_parts,
    parts_of,
)
from jaxmorph.schedule.costs import LinkDelay
from jaxmorph.training.adaptation import Adaptation
from jaxmorph.training.control_loop import ControlLoop
from jaxmorph.training.plan_in_force import PlanInForce
from jaxmorph.training.step_recorder import StepRecorder

LINKS = (Link(0, 1), Link(1, 2))
HOLD_MS = 3000.0
"""How long a transfer on a path that is down holds both queues before its link fails over."""


class Wires:
    """The simulated direct paths.

    Attributes:
        down: The links whose paths are down now.
        by_hosts: The links that failed over to the delegated route.
        restores: How often each path may still fail over and be restored.
        failures: How often each link's path was given up.
        restored: The links in the order of their restores.
        found_up: The steps in a row in which both ends found a path up, by link.
    """

    def __init__(self, restores=99):
        self.down, self.by_hosts = set(), set()
        self.restores = dict.fromkeys(LINKS, restores)
        self.failures, self.restored, self.found_up = Counter(), [], Counter()

    def fail(self, link, stages):
        self.by_hosts.add(link)
        self.failures[link] += 1
        self.found_up[link] = 0
        self.restores[link] -= 1
        detail, restores_left = f"no answer in {HOLD_MS:.0f} ms", self.restores[link]
        for rank in link:
            stages[rank].unreported.append(
                PathFailure(link, detail, resent=1, restores_left=restores_left)
            )

    def hand_over(self, link, late_ms, stages):
        """As `fail`, of a path that works, but has turned slow; what its ends report."""
        self.by_hosts.add(link)
        self.found_up[link] = 0
        left = PathFailure(
            link, late_in_words(late_ms), restores_left=self.restores[link], late_ms=late_ms
        )
        for rank in link:
            stages[rank].unreported.append(left)
        return SlowLink(link, late_ms, left)


class Stage:
    """One rank's stage, with its ends of the paths."""

    delegated = None

    def __init__(self, rank, wires, stages):
        self._rank, self._wires, self._stages = rank, wires, stages
        self.unreported, self.failed_before, self.took_ms = [], [], []

    def begin_failed_over(self, link):
        self.failed_before.append(link)

    def on_slow_link(self, call):
        pass

    def take_link_failures(self):
        reported, self.unreported = self.unreported, []
        return reported

    def path_is_up(self, link):
        return None if self._rank not in link else link not in self._wires.down

    def restore_direct(self, link):
        assert link in self._wires.by_hosts  # once for each failure
        if self._rank == link.upper:
            self._wires.by_hosts.discard(link)
            self._wires.restored.append(link)

    def probe(self, link, step):
        if self._rank not in link:
            return []
        if link in self._wires.down:
            if self._rank == link.upper:
                self._wires.fail(link, self._stages)
            return []
        return [Stamp(transfer, 0.0, 0.5e-3) for transfer in probe_transfers(link, 1)]

    def free_slots(self, slots, *, sending, keep=()):
        return ()

    def add_slots(self, slots, *, sending):
        pass

    def message_times_ms(self):
        return self.took_ms


class Mirror:
    """A rendezvous in which every rank sends what this one does."""

    secret = b""
    members: Sequence[int] = range(3)

    def __init__(self, rank):
        self.rank, self.num_ranks, self.exchanges = rank, 3, 0

    def group(self, name, members):
        return self

    def exchange(self, message, detail=b"", addressed=()):
        self.exchanges += 1
        return [message] * 3

    def limit(self, deadline_s, *, starts=False):
        pass

    def notify(self, doing, *, has_stalled=False):
        pass

    def close(self):
        pass


class FailingRun:
    """Steps of all three ranks, one after another, with decisions in between.

    Attributes:
        log: Of each step: its number, the plan's routes, and the failed-over links at its
            begin and end.
    """

    def __init__(self, restores=99, dead=(), hands_over=False, **settings):
        """A run; links in `dead` failed before its start.

        Args:
            hands_over: Whether links that turn slow are handed over and reported in mid-step.
        """
        self.watches = {link: EndWatch(link) for link in LINKS} if hands_over else {}
        adaptation = CONFIG.adaptation.model_copy(update=settings)
        config = CONFIG.model_copy(update={"adaptation": adaptation})
        self.wires, self.messages, self.log, self.step = Wires(restores), [], [], 0
        self.wires.by_hosts.update(dead)
        detector = Detector()
        for direction in (each for link in dead for each in directions_of(link)):
            detector = detector.observe_failure(-1, direction, "it had failed before")
        plan = replace(FIRST, routes={**FIRST.routes, **dict.fromkeys(dead, "delegated")})
        self.plans: Any = PlansHere(config=config, in_force=plan)
        state = first_state(adaptation, plan, PLANNED_FOR, USUAL, detector)
        self.loop = ControlLoop(state, self.plans)
        self.loop.start(lambda: None)
        self.programs = list(lower_step(plan.schedule, PLANNED_FOR, plan.routes))
        self.routes = dict(plan.routes)
        in_force = PlanInForce(plan, tuple(self.programs), 0)
        self.profiler = Profiler(3)
        self.recorder = StepRecorder(
            config, in_force, self.profiler, self.messages.append, active=True, loop=self.loop
        )
        stages = []
        stages += [Stage(rank, self.wires, stages) for rank in range(3)]
        self.stages = stages
        loops = (self.loop, None, None)
        self.ranks = [
            Adaptation(Mirror(rank), stages[rank], self.recorder, loops[rank], 10**6, failed=dead)
            for rank in range(3)
        ]

    def steps(self, count, slow_ms=None):
        """Some steps; `slow_ms` has links' delays on either route: a number, or (there, back)."""
        for _ in range(count):
            self._step(slow_ms or {})

    def cut(self, link):
        self.wires.down.add(link)

    def heal(self, link):
        self.wires.down.discard(link)

    def events(self, *kinds):
        """The events of some kinds: step, kind and link."""
        return [(e.step, e.kind, e.link) for e in self._events() if e.kind in kinds]

    def details(self, kind):
        return [event.detail for event in self._events() if event.kind == kind]

    def _events(self):
        return [each.event for each in self.messages if isinstance(each, EventEmitted)]

    def records(self):
        return [each.record for each in self.messages if isinstance(each, StepDone)]

    def close(self):
        self.recorder.__exit__(None)
        self.loop.close()

    def _step(self, slow_ms):
        wires, before = self.wires, set(self.wires.by_hosts)
        used = {link for link, route in self.routes.items() if route == "direct"}
        failing = (used & wires.down) - wires.by_hosts
        links = {link: self._state(link, slow_ms.get(link, 0.0), failing) for link in LINKS}
        timeline = simulate_blocking(self.programs, COSTS, links)
        for link in sorted(failing):
            wires.fail(link, self.stages)
        self._watch(timeline)
        routes, after = dict(self.routes), set(wires.by_hosts)
        self.log.append((self.step, routes, before, after))
        waited_ms = HOLD_MS if failing else 0.0
        reports = [self._report(rank, timeline, waited_ms) for rank in range(3)]
        for link in after:
            wires.found_up[link] = 0 if link in wires.down else wires.found_up[link] + 1
        self.recorder.record(self.step, StepTotals(1.0, 1.0), reports, 0.3)
        self._apply(reports)
        self.recorder.on_disk().result(30)
        self._await_answers()
        self.step += 1

    def _await_answers(self):
        for _ in range(4):  # of the planning process, one after another
            for thread in (self.loop._hearing, self.loop._planner):
                thread.submit(lambda: None).result(30)

    def _watch(self, timeline):
        """Hand over the direct links whose messages have become slow in this step."""
        took_ms = {}  # without the wait of the end that came first
        for span in timeline.transfers:
            each_ms = span.end_ms - span.start_ms
            if span.holds_queue:
                took_ms[span.label] = min(each_ms, took_ms.get(span.label, each_ms))
        for link, watch in self.watches.items():
            late_ms = {}
            for number, (label, each_ms) in enumerate(took_ms.items()):
                transfer = Transfer.parse(label)
                if transfer.link == link and link not in self.wires.by_hosts:
                    direction = transfer.source, transfer.destination
                    at_ms = 1e3 * self.step + number
                    late_ms = late_ms or watch.late_messages({direction: each_ms}, at_ms)
            if late_ms:
                self.loop.hear(self.wires.hand_over(link, late_ms, self.stages))
            watch.end_step()
        self._await_answers()

    def _apply(self, reports):
        before = len(self.wires.restored)
        for rank in range(3):
            seen = [self._seen_by(rank, reports[0]), *reports[1:]]
            result: Any = SimpleNamespace(step=self.step, parts_of=partial(parts_of, seen))
            program = self.ranks[rank].after(result).program
            self.programs[rank] = program or self.programs[rank]
        for link in self.wires.restored[before:]:
            if link in self.watches:
                self.watches[link].restart()
            self.on_restored(link, self.wires.found_up[link])
        self.recorder.on_disk().result(30)
        self.routes = dict(self.loop.state.plan.routes)

    def _seen_by(self, rank, report_of_rank_0):
        own = self.addressed[rank]["own_parts"] if self.addressed else {}
        return replace(report_of_rank_0, own_parts=own)

    def on_restored(self, link, found_up):
        """Called when a path is restored, with the steps in a row that it was up."""

    def _state(self, link, slow_ms, failing):
        usual = USUAL[self.routes[link]][link].forward_latency_ms
        if link in failing:
            return LinkDelay(HOLD_MS, HOLD_MS)
        if self.routes[link] == "direct" and link in self.wires.by_hosts:
            return LinkDelay()  # the sender does not wait
        there_ms, back_ms = slow_ms if isinstance(slow_ms, tuple) else (slow_ms, slow_ms)
        return LinkDelay(usual + there_ms, usual + back_ms)

    def _report(self, rank, timeline, waited_ms):
        """A rank's report; at worst all of its times include the wait for a link."""
        spans = [span for span in timeline.transfers if span.stage == rank]
        self.stages[rank].took_ms = [
            (Transfer.parse(span.label), span.end_ms - span.start_ms) for span in spans
        ]
        parts = self.ranks[rank].report(self.step, 0.0)
        if rank == 0:
            self.addressed = json.loads(dump(addressed_parts(parts)))
        ops = zip(
            timeline.orders[rank], timeline.start_ms[rank], timeline.end_ms[rank], strict=True
        )
        timings = StepTimings.of(
            [(op, float(start), float(end) + waited_ms) for op, start, end in ops],
            [_times(span, waited_ms) for span in spans if span.holds_queue],
            [_times(span, waited_ms) for span in spans if not span.holds_queue],
        )
        own = StepReport(1.0, 1.0, parts=named_parts(parts))
        message = json.loads(dump(own.to_json()))
        return StepReport.from_json(message | {DETAIL: timings.detail()}, rank)


def _times(span, waited_ms):
    return Transfer.parse(span.label), float(span.start_ms), float(span.end_ms) + waited_ms
