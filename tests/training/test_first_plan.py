"""The links that an adapting run may delegate before its first step."""

from types import SimpleNamespace
from typing import Any

import pytest
from test_sidecars import timings

from jaxmorph.config import check_config
from jaxmorph.control.conditions import UsualLinks
from jaxmorph.records import Link
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.schedule.costs import LinkDelay, chain_links
from jaxmorph.training import first_plan
from jaxmorph.training.first_plan import _agree_on_delegable, planned_links, too_short_deadline

FOUR = (0.5, 30.0, 0.4)
OPS = ("forward_ms", "backward_input_ms", "backward_weight_ms")


@pytest.mark.parametrize(
    ("adaptation", "latencies_ms", "links"),
    [
        ({}, FOUR, []),
        ({"enabled": True}, FOUR, [Link(1, 2)]),
        ({"enabled": True}, (0.5, 30.0), [Link(1, 2)]),
        ({"enabled": True, "delegates": "any"}, FOUR, [Link(0, 1), Link(1, 2), Link(2, 3)]),
    ],
)
def test_slow_links_or_all_allowed_ones_are_delegable(adaptation, latencies_ms, links):
    stages = {"stages": len(latencies_ms) + 1}
    config = check_config({"parallelism": stages, "adaptation": adaptation})
    usual: UsualLinks = {"direct": chain_links(latencies_ms), "delegated": {}}
    assert _agree_on_delegable(config, SoleRank(), usual, ()) == links


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
    first_plan._warm_up(
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
