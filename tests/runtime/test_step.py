"""A step's update and report, and its message where values are not finite."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxmorph.control.rank_times import timeline_of
from jaxmorph.placement import Replica
from jaxmorph.program.instructions import Payload, Transfer
from jaxmorph.records import EventKind
from jaxmorph.runtime.causes import WaitedInVainError
from jaxmorph.runtime.direct import PathFailedError
from jaxmorph.runtime.executor import StepInputs, StepOutcome
from jaxmorph.runtime.gradient_sum import GradientSum
from jaxmorph.runtime.queue import Stamp
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.runtime.report import LinkEvent, StepTotals
from jaxmorph.runtime.routes import TransferIdentity
from jaxmorph.runtime.step import StepRunner, apply_gradients, not_finite_in_words
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.transport.names import PeerGoneError

INPUTS = StepInputs(None, None, 1.0)
PROGRAM: Any = SimpleNamespace()
IDENTITY = TransferIdentity(0, 3, Transfer(Payload.GRADIENT, 0, 1, 0))


class Stage:
    """A stage that records what is done with its gradients."""

    shares = None
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 9})

    def __init__(self, *chunks, loss=2.0):
        self.gradients, self.loss, self.done = chunks, loss, []

    def run(self, program, inputs, step):
        self.done.append(f"step {step}")
        return StepOutcome(self.loss, (), [Stamp(Op(OpKind.F, 0), 7.25, 7.5)])

    def squared_norm(self):
        return 16.0

    def events(self):
        return [{"time_s": 7.0, "kind": "lane_up"}]

    def update(self, scale):
        self.done.append(scale)

    def discard(self):
        self.done.append("discarded")


@dataclass(frozen=True)
class Part:
    number: int = 0


@dataclass(frozen=True)
class Silent:
    number: int = 0


def run(stage, **options):
    return StepRunner(stage, SoleRank(), clip_norm=1.0).run(PROGRAM, INPUTS, 3, **options)


def test_a_step_clips_updates_and_reports():
    stage: Any = Stage()
    result = run(stage, began_s=7.0, report=lambda step: (Part(step), Silent()))
    assert stage.done == ["step 3", 0.25]
    assert (result.step, result.updated) == (3, True)
    assert (result.totals.loss, result.totals.grad_norm) == (2.0, 4.0)
    (report,) = result.reports
    assert report.peak_device_bytes == 9
    assert result.parts_of(Part) == [Part(3)]
    assert [*report.parts] == ["Part"]  # what equals its default is not sent
    assert result.parts_of(Silent) == [Silent()]
    assert report.timings == result.timings
    (span,) = timeline_of([result.timings]).spans()
    assert (str(span.op), span.start_ms, span.end_ms) == ("F0", 250.0, 500.0)
    assert result.timings.events == (LinkEvent(0.0, EventKind.LANE_UP),)
    assert result.ended_s - 7.0 == result.step_s


def test_a_step_that_is_not_finite_updates_nothing():
    stage: Any = Stage(loss=math.nan)
    result = run(stage)
    assert stage.done == ["step 3", "discarded"]
    assert (result.updated, result.totals.not_finite) == (False, {0: "loss nan"})


def test_ops_of_a_shorter_step_are_shown_but_not_measured():
    stage: Any = Stage()
    runner = StepRunner(stage, SoleRank())
    longest, shorter = (
        runner.run(PROGRAM, replace(INPUTS, length_index=each), 3, began_s=7.0) for each in (0, 1)
    )
    assert [*longest.timings.op_times] == [OpKind.F]
    assert shorter.timings.op_times == {}
    assert shorter.timings.ops == longest.timings.ops


def test_a_timing_step_keeps_events_and_reads_no_gradients():
    stage: Any = Stage(loss=math.nan)
    del stage.gradients
    stage.squared_norm = lambda: pytest.fail("the norm is read")
    result = run(stage, updates=False)
    (report,) = result.reports
    assert (report.squared_norm, report.not_finite) == (0.0, "")
    assert stage.done == ["step 3", "discarded"]
    assert (result.updated, result.events) == (False, ())


def arrays(**values):
    return {name: jnp.full((2, 3), value) for name, value in values.items()}


def test_gradients_of_a_finite_norm_are_not_read():
    unread: Any = SimpleNamespace()
    assert not_finite_in_words(unread, StepOutcome(2.5, (), []), 1.0) == ""


@pytest.mark.parametrize(
    ("loss", "chunks", "message"),
    [
        (
            0.0,
            [{"attention": arrays(kernel=math.inf), "norm": arrays(scale=1.0)}],
            "gradients of 1 of 2 arrays (layers/attention/kernel)",
        ),
        (
            math.nan,
            [arrays(a=math.nan, b=1.0, c=math.inf, d=math.nan)],
            "loss nan, gradients of 3 of 4 arrays (layers/a, layers/c, ...)",
        ),
        (
            0.0,
            [arrays(a=1.0), arrays(a=math.nan)],
            "gradients of 1 of 2 arrays (chunk 1 layers/a)",
        ),
        (0.0, [arrays(a=1e30)], "finite gradients, the sum of whose squares is not"),
    ],
)
def test_gradients_that_are_not_finite_are_named(loss, chunks, message):
    stage: Any = Stage(*({"layers": chunk} for chunk in chunks))
    assert not_finite_in_words(stage, StepOutcome(loss, (), []), math.inf) == message


def test_another_replicas_share_that_is_not_finite_is_named():
    stage: Any = Stage({"layers": jnp.ones(2)})
    stage.shares = "some"
    found = not_finite_in_words(stage, StepOutcome(0.0, (), []), math.nan)
    assert found == "gradients of another replica's share"


def test_an_auxiliary_loss_that_is_not_finite_is_named_in_place_of_the_loss():
    stage: Any = Stage({"layers": arrays(a=math.nan)})
    outcome = StepOutcome(math.nan, (), [], aux={"balance": math.inf, "size": 1.0})
    words = not_finite_in_words(stage, outcome, math.nan)
    assert words == "auxiliary loss balance inf, gradients of 1 of 1 arrays (layers/a)"


@pytest.mark.parametrize(
    ("loss", "norm", "done"),
    [
        (1.0, 4.0, 0.25),  # clipped
        (math.nan, 1.0, "discarded"),
        (math.inf, 1.0, "discarded"),
        (1.0, math.nan, "discarded"),
        (1.0, math.inf, "discarded"),
    ],
)
def test_only_a_finite_step_updates(loss, norm, done):
    stage: Any = Stage()
    assert apply_gradients(stage, StepTotals(loss, norm), clip_norm=1.0) == (done == 0.25)
    assert stage.done == [done]


class Waiting(Stage):
    """A stage whose run ends with an error."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def run(self, program, inputs, step):
        raise self.error


@pytest.mark.parametrize(
    ("error", "waited_for"),
    [
        (PeerGoneError("rank 1 is gone", 1), 5),
        (WaitedInVainError("link 0-1 carries nothing", None), None),
        (PathFailedError(IDENTITY, 0, ValueError("reset")), 4),
    ],
)
def test_errors_of_a_replica_name_the_runs_rank(error, waited_for):
    rendezvous: Any = SimpleNamespace(members=[4, 5])
    replicas: Any = SimpleNamespace(own=Replica(2, 3))
    stage: Any = Waiting(error)
    runner = StepRunner(stage, rendezvous, gradient_sum=GradientSum(replicas, None))
    message, own_args = str(error), error.args
    for run in (runner.run, runner.forwards):
        error.args, error.waited_for = own_args, None if waited_for is None else waited_for - 4
        with pytest.raises(type(error)) as caught:
            run(PROGRAM, INPUTS, 3)
        assert str(caught.value) == f"in replica 2, whose ranks are the run's 4, 5: {message}"
        assert caught.value.waited_for == waited_for


def test_errors_of_the_first_replica_need_no_explanation():
    replicas: Any = SimpleNamespace(own=Replica(0, 3))
    stage: Any = Waiting(PeerGoneError("rank 1 is gone", 1))
    first: Any = SimpleNamespace(members=range(2))
    runner = StepRunner(stage, first, gradient_sum=GradientSum(replicas, None))
    with pytest.raises(PeerGoneError, match=r"^rank 1 is gone$") as caught:
        runner.run(PROGRAM, INPUTS, 3)
    assert caught.value.waited_for == 1
