"""Which events of a run stay in one that was replayed with other settings."""

from types import SimpleNamespace
from typing import Any

from jaxmorph.cli.replay import _events
from jaxmorph.records import Event, EventKind

REPLANNED, REROUTED = EventKind.PLAN_CHANGED, EventKind.ROUTE_CHANGED


def test_only_what_a_controller_decided_is_replaced():
    happened = [
        Event(1.0, 2, REPLANNED),  # before the first simulated step
        Event(2.0, 3, REPLANNED),
        Event(2.0, 3, REROUTED, "0-1"),
        Event(2.0, 3, EventKind.RANK_FAILED),
        Event(2.0, 3, REROUTED),  # without a link: of the sum of gradients
        Event(3.0, 4, REPLANNED),  # in a step that was not simulated
        Event(5.0, 6, REPLANNED),  # after the last one
    ]
    simulated: Any = SimpleNamespace(replica=0, steps={3: None, 5: None}, moments=())
    records: Any = {step: SimpleNamespace(step_s=2.0) for step in range(7)}
    found = [*_events(happened, [simulated], records, [3, 5])]
    assert [(each.step, each.kind, each.time_s) for each in found] == [
        (2, REPLANNED, 1.0),
        (3, EventKind.RANK_FAILED, 3.0),
        (3, REROUTED, 3.0),
        (4, REPLANNED, 5.0),
        (6, REPLANNED, 5.0),
    ]
