"""Ranks change places: who decides what, and who sends whom a stage's state."""

from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.config import check_config
from jaxmorph.control.profiler import Profile
from jaxmorph.control.remap import SlowPair
from jaxmorph.placement import Layout, Placement, Position
from jaxmorph.records import EventKind, Link
from jaxmorph.runtime.report import SumTook
from jaxmorph.schedule.costs import LinkDelay, StageCosts
from jaxmorph.training.callbacks import SaveRequest
from jaxmorph.training.first_plan import predicted_step_s
from jaxmorph.training.loop import GOES_ON
from jaxmorph.training.remap import (
    Moves,
    PairTimes,
    Remapping,
    exchange_states,
)
from tests.runtime.test_rendezvous import in_threads


def config_of(num_replicas, stages=2, schedule="zb-h2"):
    return check_config(
        {
            "parallelism": {"stages": stages, "data": num_replicas},
            "batch": {"microbatches": 4 * num_replicas},
            "model": {"num_layers": 4},
            "schedule": {"name": schedule},
        }
    )


CONFIG = config_of(2)
LAYOUT = Layout.first(2, 2)
COMPILED: list[Any] = []
"""The stages that the last remapping compiled."""


def state_of(rank):
    weights = jnp.full((3, 2), rank, jnp.float32)
    count = jnp.int32(rank)
    return {"params": {"layers": {"w": weights}}, "optimizer": {"0": {"count": count}}}


@pytest.mark.parametrize(
    ("after", "divides", "sources"),
    [
        (LAYOUT.swapped(2, 3), False, [None, None, 3, 2]),
        (LAYOUT.swapped(1, 2), False, [None, 2, 1, None]),
        (LAYOUT.swapped(1, 3), False, [None] * 4),  # the same stage in another replica
        (LAYOUT.swapped(1, 3), True, [None, 3, None, 1]),
    ],
)
def test_ranks_get_the_states_of_their_new_places(after, divides, sources):
    def exchange(rendezvous):
        own, host = (state_of(rendezvous.rank),), "127.0.0.1"
        return exchange_states(rendezvous, LAYOUT, after, own, host, 20.0, divides=divides)

    for got, source in zip(in_threads(4, exchange), sources, strict=True):
        if source is None:
            assert got == ()
            continue
        (part,) = got
        np.testing.assert_equal(part, state_of(source))
        assert part["params"]["layers"]["w"].dtype == np.float32


class Recorder:
    def __init__(self):
        self.kinds = []

    def emit(self, step, kind, detail, evidence=None):
        self.kinds.append(kind)


def result(
    step,
    took_s=(0.01, 0.01),
    moves=Moves(),  # noqa: B008
    stop_asked=False,
    pairs=None,
    of_ranks=None,
):
    parts = {
        SumTook: [*map(SumTook, took_s)],
        PairTimes: [PairTimes(of_ranks=of_ranks or {}), PairTimes(pairs or {})],
        Moves: [moves, Moves()],
        SaveRequest: [SaveRequest(stop_asked=stop_asked)],
    }
    step_s = 0.4 + max(took_s)
    return cast(
        Any, SimpleNamespace(step=step, updated=True, step_s=step_s, parts_of=parts.__getitem__)
    )


def compile_stage(position) -> Any:
    COMPILED.append(position)
    return f"compiled {position}"


def first_plan(stages, latencies_ms=()) -> Any:
    links = Placement(stages).links
    delays = [LinkDelay(each_ms, each_ms) for each_ms in latencies_ms or (1.0,) * len(links)]
    measured = dict(zip(links, delays, strict=True))
    profile = Profile(StageCosts.uniform(stages, 10.0, 10.0, 10.0), measured)
    usual = {"direct": measured, "delegated": measured}
    return SimpleNamespace(planned_for=profile, usual=usual, room=None)


def remapping_of(layout, compile_stage=compile_stage, shares=None, known=(), took_s=0.0):
    COMPILED.clear()
    predicted_s = partial(predicted_step_s, config_of(layout.num_replicas), first_plan(2), 0)
    replicas = SimpleNamespace(
        layout=layout, pipeline=SimpleNamespace(rank=1), all_ranks=SimpleNamespace(rank=3)
    )
    probe = lambda gradients, step: {"0-1": 0.1, "1-2": 2.0}  # noqa: E731
    sums = cast(
        Any,
        SimpleNamespace(
            replicas=replicas,
            probe=probe,
            direct="sums",
            time_ranks=lambda ranks, gradients, num_bytes, step: took_s,
        ),
    )
    stage = cast(Any, SimpleNamespace(gradients=(), shares=shares))
    recorder = cast(Any, Recorder())
    return Remapping(
        config_of(layout.num_replicas),
        predicted_s,
        recorder,
        sums,
        stage,
        compile_stage,
        known=known,
        active=True,
        last_step=9,
    )


def test_a_run_that_adapts_counts_a_slow_link_as_delegated():
    """Both ends of a direct transfer wait for it, so only the delegated delay is absorbed."""
    first, slow = first_plan(4), {Link(1, 2): 15.0}
    fixed, adapts = config_of(2, 4, "zb-h2"), config_of(2, 4, "adaptive")
    healthy_s, waits_s, absorbs_s = (
        predicted_step_s(config, first, 0, delays_ms)
        for config, delays_ms in [(adapts, {}), (fixed, slow), (adapts, slow)]
    )
    assert healthy_s < absorbs_s < waits_s - 0.015


@pytest.mark.parametrize("schedule", ["zb-h2", "adaptive"])
def test_the_slow_link_of_this_layout_is_not_slow_in_others(schedule):
    config = config_of(2, 4, schedule)
    now, healthy = first_plan(4, (1.0, 1.0, 40.0)), first_plan(4)
    for slow in ({}, {Link(0, 1): 40.0}, {Link(0, 3): 40.0}):
        expected_s = predicted_step_s(config, healthy, 1, slow)
        assert predicted_step_s(config, now, 1, slow) == pytest.approx(expected_s)


@pytest.fixture
def remapping():
    return remapping_of(LAYOUT)


def test_a_slow_sum_moves_ranks_once_the_layout_is_found(remapping):
    for step, took_s in enumerate([(0.01, 0.01), (0.01, 2.0), (0.01, 2.0)]):
        assert remapping.report(step, 0.0) == (Moves(), PairTimes())
        assert remapping.after(result(step, took_s)) == GOES_ON
    assert remapping._recorder.kinds == [EventKind.SUM_SLOW]
    remapping._deciding.result(60)
    moves, _ = remapping.report(3, 0.0)
    assert moves.ranks[0][0] == 0
    assert moves.joined([moves, Moves()]) == Moves().joined([moves, Moves()]) == moves
    assert remapping.after(result(3, moves=moves)) == GOES_ON
    remapping._compiling.result(60)
    assert [replace(LAYOUT, ranks=moves.ranks).positions[3]] == COMPILED
    assert COMPILED[0].stage == 0
    assert remapping.after(result(4, moves=Moves(ready=False))) == GOES_ON
    assert remapping.report(5, 0.0) == (Moves(), PairTimes())
    effect = remapping.after(result(5))
    assert effect.ends
    assert remapping._recorder.kinds == [EventKind.SUM_SLOW, EventKind.REMAPPED]
    assert remapping.layout == replace(LAYOUT, ranks=moves.ranks)
    assert remapping.compiled == f"compiled {COMPILED[0]}"
    assert [pair.ranks for pair in remapping.slow] == [(1, 3)]


@pytest.mark.parametrize(("took_s", "goes_back"), [(0.5, True), (2.5, False)])
def test_ranks_go_back_once_no_pair_is_slow_any_more(took_s, goes_back):
    """A round took 0.1 s, and then 2 s more."""
    moved = LAYOUT.swapped(2, 3)
    slow = SlowPair((1, 3), 4.0, delay_ms=2000.0, usual_ms=100.0, bucket_bytes=400)
    remapping = remapping_of(moved, known=(slow,), took_s=took_s)
    step, again = 5, CONFIG.adaptation.recheck_steps
    assert remapping.report(step, 0.0)[0] == Moves()
    assert remapping.report(step + again - 1, 0.0)[0] == Moves()
    moves, _ = remapping.report(step + again, 0.0)
    assert moves.again == ((1, 3, 400),)
    assert moves.joined([Moves(), moves]) == moves
    remapping.after(result(step + again, moves=moves))
    moves, timed = remapping.report(step + again + 1, 0.0)
    assert (moves, timed) == (Moves(), PairTimes(of_ranks={"1-3": took_s}))
    remapping.after(result(step + again + 1, of_ranks=timed.of_ranks))
    assert remapping.slow == (() if goes_back else (slow,))
    moves, _ = remapping.report(step + again + 2, 0.0)
    assert moves.ranks == (LAYOUT.ranks if goes_back else ())


def test_a_run_that_is_asked_to_end_moves_no_rank(remapping):
    moves = Moves(LAYOUT.swapped(1, 2).ranks)
    assert remapping.after(result(3, (0.01, 0.01), moves)) == GOES_ON
    assert remapping.after(result(4, (0.01, 0.01), stop_asked=True)) == GOES_ON
    assert remapping.layout is None
    assert remapping.after(result(5, (0.01, 0.01))).ends


def test_a_decision_that_comes_with_the_end_compiles_nothing(remapping):
    moves = Moves(LAYOUT.swapped(2, 3).ranks)
    assert remapping.after(result(3, (0.01, 0.01), moves, stop_asked=True)) == GOES_ON
    assert remapping._compiling is None


def test_no_rank_moves_to_a_stage_that_cannot_be_compiled(caplog):
    def fail(position):
        raise RuntimeError("out of memory")

    remapping = remapping_of(LAYOUT, fail)
    remapping.after(result(3, (0.01, 0.01), Moves(LAYOUT.swapped(2, 3).ranks)))
    assert remapping._compiling is not None
    assert "out of memory" in str(remapping._compiling.exception(60))
    assert remapping.report(4, 0.0) == (Moves(ready=False), PairTimes())
    assert remapping.after(result(4, (0.01, 0.01), Moves(ready=False))) == GOES_ON
    assert "the next stage can't be compiled: RuntimeError: out of memory" in caplog.text


@pytest.mark.parametrize(("shares", "compiled"), [(None, []), ("own", [Position(0, 1)])])
def test_a_share_of_the_optimizer_state_belongs_to_a_replica(shares, compiled):
    remapping = remapping_of(LAYOUT, shares=shares)
    remapping.after(result(3, moves=Moves(LAYOUT.swapped(1, 3).ranks)))
    if remapping._compiling is not None:
        remapping._compiling.result(60)
    assert compiled == COMPILED


def test_nothing_moves_after_the_last_step(remapping):
    remapping._deciding = Future()
    remapping._deciding.set_result(None)
    assert remapping.report(9, 0.0) == (Moves(ready=False), PairTimes())
    assert remapping._deciding is not None


def test_of_several_replicas_the_slow_pair_is_found_by_timing_each():
    layout = Layout.first(2, 3)
    remapping = remapping_of(layout)
    for step, took_s in enumerate([(0.01, 0.01), (0.01, 2.0), (0.01, 2.0)]):
        remapping.after(result(step, took_s))
    moves, _ = remapping.report(3, 0.0)
    assert moves == Moves(probe=(1,)) == Moves().joined([Moves(), moves])
    remapping.after(result(3, (0.01, 2.0), moves))
    moves, probed = remapping.report(4, 0.0)
    assert (moves, probed.took_s) == (Moves(), {"0-1": 0.1, "1-2": 2.0})
    every = PairTimes().joined([probed, PairTimes({"0-2": 0.1, "1-2": 2.1})])
    assert every.took_s == {"0-1": 0.1, "1-2": 2.0, "0-2": 0.1}
    remapping.after(result(4, (0.01, 2.0), pairs=every.took_s))
    assert remapping._deciding is not None
    assert remapping._deciding.result(60) is not None
    moves, _ = remapping.report(5, 0.0)
    assert len(moves.ranks) == 3
    assert remapping.after(result(5, (0.01, 2.0), moves)) == GOES_ON
    assert remapping.after(result(6, (0.01, 2.0))).ends
    assert [pair.ranks for pair in remapping.slow] == [(3, 5)]
