"""The host that decides a rank's order while its step runs, told by a clock that tests turn."""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import pytest

from jaxmorph.program.instructions import Payload, Run, Transfer
from jaxmorph.program.leeway import with_leeway
from jaxmorph.program.lowering import lower
from jaxmorph.runtime.identity import TransferIdentity
from jaxmorph.runtime.online_dispatch import OnlineDispatcher
from jaxmorph.schedule.builders import zb_h2
from jaxmorph.schedule.costs import Limits, Link, StageCosts, chain_links
from jaxmorph.schedule.simulator import simulate
from jaxmorph.transport.names import PeerGoneError

OP_S = 0.01
RANK, STAGES, MICROBATCHES = 1, 3, 4
TIMEOUT_S = 5.0
NEVER_S = 1e9
_MOST_WAITS = 500


def activation(microbatch):
    return Transfer(Payload.ACTIVATION, 0, 1, microbatch)


def gradient(microbatch):
    return Transfer(Payload.GRADIENT, 2, 1, microbatch)


def planned_program(really_ms=10.0):
    """The middle rank's program, and when its messages come if links are as planned.

    Args:
        really_ms: How long its own ops take, in place of the 10 ms that are planned.
    """
    costs, links = StageCosts.uniform(STAGES, 10.0, 10.0, 10.0), chain_links([5.0, 5.0])
    schedule = zb_h2(STAGES, MICROBATCHES)
    timeline = simulate(schedule, costs, links)
    programs = lower(
        schedule, timeline, dict.fromkeys([*links, Link(0, 2)], "delegated"), num_tied=0
    )
    memory = Limits().stage_memory(STAGES, MICROBATCHES)
    program = with_leeway(programs, timeline, memory)[RANK]
    own = (10.0, really_ms, 10.0)
    really = simulate(schedule, StageCosts(own, own, own), links)
    ends = {(span.stage, span.op): span.end_ms for span in really.spans()}
    come_s = {}
    for source, make in ((0, activation), (2, gradient)):
        for (stage, op), end_ms in ends.items():
            is_sent = op.kind == ("F" if source == 0 else "B")
            if stage == source and is_sent:
                come_s[make(op.microbatch)] = (end_ms + 5.0) / 1e3
    return program, come_s


class Bell:
    """Counts how often it is rung."""

    def __init__(self):
        self.rings = 0

    def ring(self):
        self.rings += 1

    def close(self):
        pass


@dataclass
class World:
    """Time, a queue that takes `OP_S` for each op, and a route whose messages come when told."""

    come_s: dict
    room_s: dict = field(default_factory=dict)
    now_s: float = 0.0
    waits: int = 0
    busy_until_s: float = 0.0
    happens: list = field(default_factory=list)
    handed: list = field(default_factory=list)
    error: Exception | None = None
    op_s: float = OP_S
    copy_fails: tuple[float, Exception] | None = None
    bell: Bell = field(default_factory=Bell)

    def clock(self):
        return self.now_s

    def wait(self, bells, condition, deadline_s):
        """Turn the clock to whatever happens next, and look only after a ring."""
        assert self.bell in bells
        self.waits += 1
        assert self.waits < _MOST_WAITS, "it waits without end, for what has come"
        times = [*self.come_s.values(), *self.room_s.values()]
        rings, is_rung = self.bell.rings, True  # it looks first of all
        while not (is_rung and condition()):
            due = [at for at in times if at > self.now_s]
            if self.happens:
                due.append(self.happens[0][0])
            self.now_s = min([*due, deadline_s])
            if self.now_s >= deadline_s:
                return False
            self._run_callbacks()
            is_rung = self.now_s in times or self.bell.rings > rings
        return True

    def _run_callbacks(self):
        while self.happens and self.happens[0][0] <= self.now_s:
            heappop(self.happens)[2]()

    def enqueue(self, instruction):
        self.handed.append((self.now_s, instruction))
        if isinstance(instruction, Run):
            self.busy_until_s = max(self.now_s, self.busy_until_s) + self.op_s

    def notify(self, callback):
        heappush(self.happens, (self.busy_until_s, len(self.handed), callback))

    def raise_error(self):
        if self.error is not None:
            raise self.error

    def has_come(self, identity):
        return self.come_s[identity.transfer] <= self.now_s

    def has_room(self, identity):
        return self.room_s.get(identity.transfer, 0.0) <= self.now_s

    def doorbell(self, identity):
        return identity

    def look(self):
        if self.copy_fails is not None and self.copy_fails[0] <= self.now_s:
            raise self.copy_fails[1]

    def dispatch(self, program):
        itself: Any = self
        dispatcher = OnlineDispatcher(
            itself, itself, TIMEOUT_S, self.clock, itself.wait, itself.bell
        )
        try:
            dispatcher.dispatch(
                program, self.enqueue, lambda transfer: TransferIdentity(0, 0, transfer)
            )
        finally:
            dispatcher.close()
        return self

    @property
    def ops(self):
        return [step.op for _, step in self.handed if isinstance(step, Run)]

    def handed_s(self, name):
        return next(at for at, step in self.handed if str(step) == f"run {name}")


def test_with_everything_on_time_the_program_is_handed_over_as_it_is():
    program, come_s = planned_program()
    world = World(come_s).dispatch(program)
    assert [step for _, step in world.handed] == list(program.instructions)


def test_what_has_come_is_handed_over_ahead_of_time():
    program, come_s = planned_program()
    world = World(dict.fromkeys(come_s, 0.0)).dispatch(program)
    assert {at for at, _ in world.handed} == {0.0}
    assert world.waits == 0


def test_while_nothing_is_late_the_host_is_woken_only_when_the_queue_is_dry():
    program, come_s = planned_program()
    in_time = World(come_s).dispatch(program)
    assert in_time.bell.rings <= len(in_time.ops) / 2


def test_in_place_of_a_late_gradient_the_rank_takes_what_is_there():
    program, come_s = planned_program()
    late = dict(come_s)
    late[gradient(1)] = late[gradient(2)] = late[gradient(3)] = 1.0
    world = World(late).dispatch(program)
    planned = [str(op) for op in program.ops()]
    assert planned.index("B1") < planned.index("W0")
    order = list(map(str, world.ops))
    assert order.index("W0") < order.index("B1")
    assert sorted(order) == sorted(planned)
    assert world.handed_s("B1") == 1.0  # the moment it is there
    assert [name for name in order if name[0] == "B"] == ["B0", "B1", "B2", "B3"]


class SlowWorld(World):
    """One in which looking for a message takes a moment, and more may come meanwhile."""

    looked_s: tuple = ()

    def has_come(self, identity):
        self.now_s += 1e-4
        return super().has_come(identity)

    def wait(self, bells, condition, deadline_s):
        has_changed = super().wait(bells, condition, deadline_s)
        self.looked_s += (self.now_s,)
        return has_changed


def test_what_comes_while_the_host_looks_around_is_not_slept_over():
    program, come_s = planned_program()

    def run(late_s):
        late = {gradient(microbatch): late_s for microbatch in range(1, MICROBATCHES)}
        return SlowWorld({**come_s, **late}).dispatch(program)

    *_, looks_s = (at_s for at_s in run(3.0).looked_s if at_s < 2.9)
    for ticks in range(1, 16):
        late_s = looks_s + ticks * 0.5e-4
        assert run(late_s).handed_s("B1") < late_s + 0.01


def test_nothing_is_chosen_before_the_queue_runs_dry_and_the_planned_op_is_late():
    program, come_s = planned_program()
    early = {transfer: 0.0 for transfer in come_s if transfer.payload is Payload.ACTIVATION}
    world = World({**come_s, **early, gradient(0): 0.3}).dispatch(program)
    assert [str(op) for op in program.ops()][:5] == ["F0", "F1", "F2", "B0", "F3"]
    assert [world.handed_s(name) for name in ("F0", "F1", "F2")] == [0.0, 0.0, 0.0]
    # It has run F2 by 30 ms; by the plan B0 starts at 55, and 0.4 of an op is tolerated.
    assert world.handed_s("F3") == pytest.approx(0.059)


@pytest.mark.parametrize("really_ms", [11.5, 13.0, 18.0, 40.0])
def test_a_stage_that_computes_slower_than_planned_keeps_its_order(really_ms):
    program, come_s = planned_program(really_ms)
    world = World(come_s, op_s=really_ms / 1e3).dispatch(program)
    assert world.ops == list(program.ops())


def test_nothing_is_late_while_an_op_runs_that_takes_longer_than_planned():
    program, come_s = planned_program()
    late = {**come_s, gradient(0): 0.2}
    world = World(late, op_s=0.1).dispatch(program)  # F0 to F2 run until 315 ms
    assert [str(op) for op in program.ops()][:5] == ["F0", "F1", "F2", "B0", "F3"]
    assert [str(op) for op in world.ops][:5] == ["F0", "F1", "F2", "B0", "F3"]
    assert world.handed_s("B0") == 0.2


def left_plan(*late_s):
    """A step whose gradients come late, each at its time."""
    program, come_s = planned_program()
    late = {gradient(microbatch): late_s[microbatch] for microbatch in range(MICROBATCHES)}
    return World({**come_s, **late}).dispatch(program)


def test_a_rank_that_has_left_the_plan_chooses_just_before_its_queue_runs_dry():
    world = left_plan(0.3, 0.308, 0.35, 0.35)
    # Until B0 is nearly over another gradient may come, and would be taken before W0: B1 does.
    handed_s = [world.handed_s(name) for name in ("B0", "B1", "W0", "W1", "B2")]
    assert handed_s == pytest.approx([0.3, 0.308, 0.3195, 0.3295, 0.35])


def test_what_nothing_would_be_taken_before_is_handed_over_at_once():
    world = left_plan(0.3, 0.3, 0.3, 0.3)
    assert list(map(str, world.ops))[-8:] == ["B0", "B1", "B2", "B3", "W0", "W1", "W2", "W3"]
    assert {world.handed_s(name) for name in ("B0", "B1", "B2", "B3", "W0", "W3")} == {0.3}


def test_an_op_whose_result_has_no_slot_is_not_taken_until_it_has_one():
    program, come_s = planned_program()
    blocked = Transfer(Payload.GRADIENT, 1, 0, 0)
    world = World(come_s, room_s={blocked: 0.5}).dispatch(program)
    order = list(map(str, world.ops))
    assert world.handed_s("B0") == 0.5
    assert order.index("F3") < order.index("B0")
    assert sorted(order) == sorted(map(str, program.ops()))


def test_what_ends_the_step_comes_after_all_ops():
    program, come_s = planned_program()
    world = World({**come_s, gradient(0): 1.0}).dispatch(program)
    assert str(world.handed[-1][1]) == "update"


def test_when_nothing_comes_for_too_long_what_is_missing_is_named():
    program, come_s = planned_program()
    with pytest.raises(TimeoutError, match=r"waited for 5 s for activation\[0\] 0>1 of step 0"):
        World(dict.fromkeys(come_s, NEVER_S)).dispatch(program)


def test_what_goes_wrong_on_the_queue_ends_the_wait():
    program, come_s = planned_program()
    world = World(dict.fromkeys(come_s, NEVER_S), error=ZeroDivisionError("on the queue"))
    with pytest.raises(ZeroDivisionError, match="on the queue"):
        world.dispatch(program)


def test_a_copy_into_a_slot_that_fails_ends_the_wait():
    program, come_s = planned_program()
    failure = RuntimeError("the copy failed")
    world = World(dict.fromkeys(come_s, NEVER_S), copy_fails=(0.1, failure))
    with pytest.raises(RuntimeError, match="the copy failed"):
        world.dispatch(program)
    assert world.now_s < 1.0


def test_a_peer_that_is_gone_ends_the_wait():
    program, come_s = planned_program()

    class Gone(World):
        def has_come(self, identity):
            raise PeerGoneError("rank 0 is gone")

    with pytest.raises(PeerGoneError, match="rank 0"):
        Gone(come_s).dispatch(program)
