"""The links that an adapting run may delegate before its first step, and its sidecars."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxmorph.config import check_config
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.control.rank_times import RankTimes
from jaxmorph.records import Link
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.schedule.costs import LinkDelay, chain_links
from jaxmorph.training import first_plan
from jaxmorph.training.first_plan import (
    SidecarLoad,
    _agree_on_delegable,
    agree_on_sidecars,
    busiest_stage_s,
    choose_sidecars,
    planned_links,
    too_short_deadline,
)

FOUR = (0.5, 30.0, 0.4)
OPS = ("forward_ms", "backward_input_ms", "backward_weight_ms")


def timings(*compute_ms):
    """A step whose stages compute for so long."""
    return [RankTimes(busy_ms=each) for each in compute_ms]


@pytest.mark.parametrize(
    ("adaptation", "latencies_ms", "links"),
    [
        ({"enabled": False}, FOUR, []),
        ({}, FOUR, [Link(1, 2)]),
        ({"enabled": True}, FOUR, [Link(1, 2)]),
        ({"enabled": True}, (0.5, 30.0), [Link(1, 2)]),
        ({"enabled": True, "delegates": "any"}, FOUR, [Link(0, 1), Link(1, 2), Link(2, 3)]),
    ],
)
def test_slow_links_or_all_allowed_ones_are_delegable(adaptation, latencies_ms, links):
    stages = {"stages": len(latencies_ms) + 1}
    config = check_config({"parallelism": stages, "adaptation": adaptation})
    usual: UsualLinks = {"direct": chain_links(latencies_ms), "delegated": {}}
    assert _agree_on_delegable(config, SoleRank(), usual, ()) == tuple(links)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({}, "after 15 s: raise timeouts.step_s"),
        ({"timeouts": {"direct_s": 20}}, "after 20 s: raise timeouts.direct_s"),
        ({"timeouts": {"direct_s": 21}}, ""),
        ({"timeouts": {"step_s": 84}}, ""),
        ({"failover": {"enabled": False}}, ""),
        ({"emulation": {"accelerator": dict.fromkeys(OPS, 1)}}, ""),  # checked before the start
    ],
)
def test_measured_ops_show_that_the_direct_deadline_is_too_short(sections, says):
    enabled = {"parallelism": {"stages": 2}, "failover": {"enabled": True}}
    steps = [timings(2_000.0, 20_500.0), timings(2_000.0, 21_000.0), timings(1.0, 1.0)]
    found = too_short_deadline(check_config({**enabled, **sections}), steps)
    assert found.endswith(says)
    assert found.startswith("a direct message may wait for all 21 s that" if says else "")
    assert bool(found) == bool(says)


@pytest.mark.parametrize(
    ("stages", "microbatches", "weight_group", "measured"),
    [
        (2, 8, 1, 8), (2, 48, 1, 12), (4, 24, 1, 12), (5, 40, 1, 15), (8, 24, 1, 16),
        (8, 16, 1, 16), (64, 256, 1, 128), (2, 48, 8, 16), (4, 30, 5, 20), (4, 24, 24, 24),
    ],
)  # fmt: skip
def test_a_measured_step_has_few_microbatches(stages, microbatches, weight_group, measured):
    config = check_config(
        {
            "parallelism": {"stages": stages},
            "model": {"num_layers": stages},
            "batch": {"microbatches": microbatches},
            "schedule": {"weight_group": weight_group},
            "failover": {"enabled": True},
        }
    )
    assert first_plan._measured_microbatches(config) == measured
    step_s = 30.0 * microbatches / measured
    assert f"for all {step_s:.3g} s that" in too_short_deadline(config, [timings(30_000.0)])


def test_links_are_planned_as_measured_unless_named():
    measured = {Link(0, 1): LinkDelay(0.5, 0.4), Link(1, 2): LinkDelay(9.0, 9.0)}
    assert planned_links(None, measured) == measured
    links = planned_links({"1-2": 30.0, "2-3": 5.0}, measured)
    assert links == {
        Link(0, 1): LinkDelay(0.5, 0.4),
        Link(1, 2): LinkDelay(30.0, 30.0),
        Link(2, 3): LinkDelay(5.0, 5.0),
    }


def test_steps_are_measured_once_slots_are_registered(monkeypatch):
    done = []

    def run(*_, **__):
        done.append("step")
        return SimpleNamespace(reports=())

    in_force = SimpleNamespace(slots={}, program=None)
    monkeypatch.setattr(first_plan, "agree_on_plan", lambda *_: in_force)
    monkeypatch.setattr(first_plan, "resize_slots", lambda *_: done.append("slots"))
    monkeypatch.setattr(first_plan, "StepRunner", lambda *_, **__: SimpleNamespace(run=run))
    monkeypatch.setattr(first_plan, "timings_of", lambda _: timings(1.0, 1.0))
    trainer: Any = SimpleNamespace(
        await_registered_slots=lambda: done.append("registered"), sidecar_s=0.0
    )
    config = check_config({"parallelism": {"stages": 2}})
    inputs: Any = None
    stash: Any = None
    noted: list[Any] = []
    first_plan._measure_steps(
        config,
        SoleRank(),
        trainer,
        inputs,
        0,
        stash,
        noted.append,
        noted.append,
    )
    assert done == ["slots", "registered", "step", "step", "step"]


def loads(*step_s, cores=64.0, host="a", compute_s=0.1):
    return [SidecarLoad(each, host, cores, True, compute_s) for each in step_s]


def test_the_busiest_rank_decides_by_the_busiest_stage():
    steps = [timings(300.0, 100.0), timings(320.0, 100.0)]
    compute_s = min(map(busiest_stage_s, steps))
    count, busy = choose_sidecars(loads(0.1, 0.39, 0.2, compute_s=compute_s))
    assert (count, busy) == (2, pytest.approx(1.3))


@pytest.mark.parametrize(
    ("ranks", "most", "count"),
    [
        (loads(9.0, cores=2.0), None, 1),  # its core is the rank's own
        (loads(9.0, cores=3.0), None, 2),
        (loads(9.0, 9.0, cores=6.0), None, 2),
        (loads(9.0, 9.0, 9.0, 9.0, cores=16.0), None, 2),
        ([*loads(9.0, cores=16.0), *loads(9.0, cores=16.0, host="b")], None, 8),
        (loads(9.0), 1, 1),
    ],
)
def test_ranks_of_a_host_share_its_cores(ranks, most, count):
    assert choose_sidecars(ranks, most)[0] == count


def test_without_measurements_there_is_one():
    assert choose_sidecars(loads(0.0, 0.0)) == (1, 0.0)
    assert choose_sidecars(loads(0.4, compute_s=0.0)) == (1, 0.0)


BUSY = " (one would be busy for 250% of a step)"
LATE = {"parallelism": {"stages": 2}, "emulation": {"links": [{"between": [0, 1]}]}}
LATE_HOST = {"parallelism": {"stages": 2}, "emulation": {"hosts": [{"between": [0, 1]}]}}


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        ({}, [4], f"4 sidecars a rank{BUSY}"),
        ({"transport": {"sidecars": 2}}, [], "2 sidecars a rank"),
        ({"transport": {"sidecars": 1}}, [], "1 sidecar a rank"),
        ({"transport": {"backend": "nixl"}}, [], f"1 sidecar a rank{BUSY}"),
        (LATE, [], f"1 sidecar a rank{BUSY}"),
        (LATE_HOST, [], f"1 sidecar a rank{BUSY}"),
        ({"limits": {"host_gib": 1}}, [2], f"2 sidecars a rank{BUSY}"),
    ],
)
def test_ranks_change_to_what_auto_finds(monkeypatch, config, changes, words):
    monkeypatch.setattr(first_plan, "usable_cores", lambda: 64.0)
    asked: list[int] = []
    trainer: Any = SimpleNamespace(
        delegated="the route", change_sidecars=lambda _, count: asked.append(count)
    )
    steps = [timings(100.0)]
    found = agree_on_sidecars(check_config(config), SoleRank(), trainer, [0.25, 0.1], steps)
    assert (asked, found) == (changes, words)
