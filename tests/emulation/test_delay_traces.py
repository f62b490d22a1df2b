import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jaxmorph.emulation.delay_traces import (
    REDRAWN_S,
    REGIMES,
    SHORT_EVENTS,
    DelayChange,
    DelayTrace,
    draw_events,
    draw_regime,
    to_csv,
)
from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.emulation.link_trace import read_link_trace
from jaxmorph.placement import Placement
from jaxmorph.records import Link

LINKS = Placement(4).links
TABLE_3 = Path(__file__).parents[2] / "configs/traces/adaptra-table3.csv"


def of_link(trace: DelayTrace, link: Link) -> list[DelayChange]:
    return [change for change in trace.changes if change.links == (link,)]


@pytest.mark.parametrize("regime", REDRAWN_S)
def test_regime_delays_match_figure_18(regime):
    trace = draw_regime(regime, LINKS, duration_s=400.0, seed=5)
    least_s, most_s = REDRAWN_S[regime]
    for link in LINKS:
        changes = of_link(trace, link)
        gaps_s = [after.at - before.at for before, after in pairwise(changes)]
        assert min(gaps_s) == pytest.approx(least_s, abs=0.02 * most_s)
        assert max(gaps_s) == pytest.approx(most_s, abs=0.02 * most_s)
        assert (changes[0].at, 399 < changes[-1].at < 400) == (0.0, True)
        delays_ms = np.array([change.latency_ms for change in changes])
        error_ms = 4 * 10 / math.sqrt(len(delays_ms))
        assert delays_ms.min() >= 0
        assert delays_ms.mean() == pytest.approx(30.0, abs=error_ms)
        assert delays_ms.std() == pytest.approx(10.0, abs=error_ms)


@pytest.mark.parametrize("regime", REGIMES)
def test_delays_depend_on_seed_and_link_only(regime):
    trace = draw_regime(regime, LINKS, 30.0, seed=1)
    assert trace == draw_regime(regime, LINKS, 30.0, seed=1)
    assert trace.changes != draw_regime(regime, LINKS, 30.0, seed=2).changes
    alone = draw_regime(regime, LINKS[1:2], 30.0, seed=1)
    assert of_link(alone, LINKS[1]) == of_link(trace, LINKS[1])
    first, second = ([c.latency_ms for c in of_link(trace, link)][:20] for link in LINKS[:2])
    assert first != second


@pytest.mark.parametrize("duration_s", [math.nan, math.inf, -1.0])
def test_an_invalid_duration_is_refused(duration_s):
    with pytest.raises(ValueError, match=r"^duration_s: got \S+, expected a finite number"):
        draw_regime("A", LINKS, duration_s, seed=1)


def test_bursty_delays_come_in_bursts():
    trace = draw_regime("bursty", LINKS, duration_s=15_000.0, seed=3)
    delays_ms = np.array([change.latency_ms for change in trace.changes])
    assert np.median(delays_ms) == pytest.approx(13.0, rel=0.03)
    assert delays_ms.mean() == pytest.approx(22.3, rel=0.02)
    assert np.percentile(delays_ms, 99) == pytest.approx(79.3, rel=0.03)
    one = np.array([change.latency_ms for change in of_link(trace, LINKS[0])])
    assert np.corrcoef(one[:-1], one[1:])[0, 1] > 0.5  # drawn one by one it would be 0


@pytest.mark.parametrize("regime", REGIMES)
def test_a_trace_round_trips_through_its_table(regime, tmp_path):
    trace = draw_regime(regime, LINKS, 20.0, seed=4)
    (tmp_path / "trace.csv").write_text(to_csv([trace]))
    assert read_link_trace(tmp_path / "trace.csv") == trace.conditions()


def _pairs(trace: DelayTrace) -> list[tuple[DelayChange, DelayChange]]:
    """The begin and the end of each event."""
    return [*zip(trace.changes[::2], trace.changes[1::2], strict=True)]


def test_events_keep_their_ranges_and_gaps():
    traces = [draw_events(LINKS, 400, seed) for seed in range(200)]
    for trace in traces:
        assert trace.changes[-1].at <= 400
        for (_, before), (after, _) in pairwise(_pairs(trace)):
            assert 20 <= after.at - before.at <= 60
    events = [pair for trace in traces for pair in _pairs(trace)]
    assert {end.at - begin.at for begin, end in events} == set(range(40, 81))
    assert {len(begin.links) for begin, _ in events} == {1, 2, 3}
    assert {link for begin, _ in events for link in begin.links} == set(LINKS)
    assert all([*begin.links] == sorted(set(begin.links)) for begin, _ in events)
    assert all((end.links, end.latency_ms) == (begin.links, 0.0) for begin, end in events)
    delays_ms = [begin.latency_ms for begin, _ in events]
    assert (min(delays_ms), max(delays_ms)) == (20.0, 60.0)


def test_events_depend_on_the_seed_only():
    assert draw_events(LINKS, 1200, seed=1) == draw_events(LINKS, 1200, seed=1)
    assert draw_events(LINKS, 1200, seed=1) != draw_events(LINKS, 1200, seed=2)
    assert draw_events(LINKS, 30, seed=1) == DelayTrace("step", ())
    (only,) = {change.links for change in draw_events(LINKS[:1], 1200, seed=1).changes}
    assert only == LINKS[:1]


@pytest.mark.parametrize("stages", [4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_the_traces_of_onsets_are_drawn_from_their_seeds(stages, seed):
    trace = draw_events(Placement(stages).links, 84, seed, SHORT_EVENTS)
    assert len(_pairs(trace)) == 3
    committed = Path(__file__).parents[2] / "configs" / "traces" / f"onset{stages}_{seed}.csv"
    assert committed.read_text() == to_csv([trace])


def test_events_are_emulated_in_their_steps(tmp_path):
    both, one = (Link(0, 1), Link(2, 3)), (Link(0, 1),)
    rows = [(3, both, 40.0), (5, both, 0.0), (9, one, 5.0), (11, one, 0.0)]
    trace = DelayTrace("step", tuple(DelayChange(*row) for row in rows))
    assert to_csv([trace]) == (
        "step,links,latency_ms\n3,0-1 2-3,40\n5,0-1 2-3,0\n9,0-1,5\n11,0-1,0\n"
    )
    assert trace.conditions()[:3] == [
        LinkCondition((0, 1), 40.0, from_step=3, to_step=5),
        LinkCondition((2, 3), 40.0, from_step=3, to_step=5),
        LinkCondition((0, 1), 0.0, from_step=5, to_step=9),
    ]
    (tmp_path / "events.csv").write_text(to_csv([trace]))
    assert read_link_trace(tmp_path / "events.csv") == trace.conditions()


def test_table_3_has_nine_events_on_17_links():
    slow = [each for each in read_link_trace(TABLE_3) if each.latency_ms]
    spans = {(each.from_step, each.to_step) for each in slow}
    assert len(spans) == 9
    assert all(end - begin == 70 for begin, end in spans if begin is not None and end is not None)
    assert len(slow) == 17
    assert sum(each.latency_ms for each in slow) == 30 + 80 + 20 + 150 + 60 + 120 + 40 + 120 + 100
    assert max(each.between for each in slow) == (6, 7)
