"""How many sidecars ranks get."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxmorph.config import check_config
from jaxmorph.control.rank_times import RankTimes
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.training import sidecars
from jaxmorph.training.sidecars import (
    SidecarChoice,
    SidecarLoad,
    agree_on_sidecars,
    busiest_stage_s,
    choose_sidecars,
)


def timings(*compute_ms):
    """A step whose stages compute for so long."""
    return [RankTimes(busy_ms=each) for each in compute_ms]


def loads(*step_s, cores=64.0, host="a", compute_s=0.1):
    return [SidecarLoad(each, host, cores, True, compute_s) for each in step_s]


def test_the_busiest_rank_decides_by_the_busiest_stage():
    steps = [timings(300.0, 100.0), timings(320.0, 100.0)]
    compute_s = min(map(busiest_stage_s, steps))
    choice = choose_sidecars(loads(0.1, 0.39, 0.2, compute_s=compute_s))
    assert (choice.count, choice.busy) == (2, pytest.approx(1.3))
    assert str(choice) == "2 sidecars a rank (one would be busy for 130% of a step)"


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
    assert choose_sidecars(ranks, most).count == count


def test_without_measurements_there_is_one():
    assert choose_sidecars(loads(0.0, 0.0)) == SidecarChoice(1)
    assert choose_sidecars(loads(0.4, compute_s=0.0)) == SidecarChoice(1)
    assert str(SidecarChoice(1)) == "1 sidecar a rank"


LATE = {"parallelism": {"stages": 2}, "emulation": {"links": [{"between": [0, 1]}]}}


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        ({}, [4], "4 sidecars a rank (one would be busy for 250% of a step)"),
        ({"transport": {"sidecars": 2}}, [], "2 sidecars a rank"),
        ({"transport": {"backend": "nixl"}}, [], "1 sidecar a rank (one would be busy for 250%"),
        (LATE, [], "1 sidecar a rank (one would be busy for 250%"),
        ({"limits": {"host_gib": 1}}, [2], "2 sidecars a rank"),
    ],
)
def test_ranks_change_to_what_auto_finds(monkeypatch, config, changes, words):
    monkeypatch.setattr(sidecars, "usable_cores", lambda: 64.0)
    asked: list[int] = []
    trainer: Any = SimpleNamespace(
        delegated="the route", change_sidecars=lambda _, count: asked.append(count)
    )
    steps = [timings(100.0)]
    found = agree_on_sidecars(check_config(config), SoleRank(), trainer, [0.25, 0.1], steps)
    assert (asked, found[: len(words)]) == (changes, words)
