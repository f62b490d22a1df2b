from collections import Counter

import pytest

from benchmarks.chaos.faults import QUIET_STEPS, draw_faults, draw_troubles, trace_text
from benchmarks.chaos.features import Features, known_features
from jaxmorph.transport.link_emulator import by_direction
from jaxmorph.transport.link_trace import read_link_trace

PLAIN, ALL = Features(False, False), Features(True, True)
CARDS, KILLS = Features(False, True), Features(True, False)
DIRECT = ["1-2"]


def drawn(seed, features=ALL, num_steps=240):
    return draw_faults(seed, num_steps, 3, frozenset({0, 1}), features)


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_gives_the_same_faults_one_after_another_and_the_end_is_quiet(seed):
    faults = drawn(seed)
    assert faults == drawn(seed)
    assert faults != drawn(seed + 1)
    ends = [max(fault.step, fault.until_step) for fault in faults]
    assert all(end < fault.step for end, fault in zip(ends, faults[1:], strict=False))
    assert ends[-1] <= 240 - QUIET_STEPS
    assert len(faults) > 30


@pytest.mark.parametrize("seed", range(5))
def test_no_sidecar_dies_more_often_than_it_may_and_only_ranks_that_have_one_lose_it(seed):
    of_sidecars = [fault for fault in drawn(seed) if fault.kind.startswith("sidecar")]
    assert {fault.rank for fault in of_sidecars} == {0, 1}
    kills = Counter(fault.rank for fault in of_sidecars if fault.kind == "sidecar killed")
    assert max(kills.values()) <= 4


def test_all_kinds_come_and_ranks_are_killed_only_where_runs_start_again():
    kinds = {fault.kind for seed in range(9) for fault in drawn(seed)}
    plain = {fault.kind for seed in range(9) for fault in drawn(seed, PLAIN)}
    assert kinds - plain == {"rank killed"}
    assert len(kinds) == 5


@pytest.mark.parametrize("seed", range(5))
def test_troubles_of_links_can_be_read_as_a_trace_and_each_comes_to_its_end(seed, tmp_path):
    troubles = draw_troubles(seed, 3, DIRECT, PLAIN)
    assert troubles == draw_troubles(seed, 3, DIRECT, PLAIN)
    (tmp_path / "links.csv").write_text(trace_text(troubles, PLAIN))
    ways = by_direction(read_link_trace(tmp_path / "links.csv"))
    assert set(ways) == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert {trouble.kind for trouble in troubles} == {"slow", "narrow", "unsteady", "cut"}
    for trouble in troubles:
        low, sign, high = trouble.link
        way = (int(low), int(high))
        assert sign in "->"
        (holds,) = (c for c in ways[way].holding(0, trouble.begins_s + 0.01) if _is_bad(c))
        assert holds.cut == (trouble.kind == "cut")
        assert not any(map(_is_bad, ways[way].holding(0, trouble.ends_s + 0.01)))


def _is_bad(condition):
    return condition.cut or condition.latency_ms or condition.bandwidth_mbps


def test_cards_go_down_only_where_a_trace_may_name_a_route():
    text = trace_text(draw_troubles(1, 3, DIRECT, PLAIN), PLAIN)
    assert text.startswith("time_s,links,latency_ms,bandwidth_mbps,jitter_ms,cut\n")
    troubles = draw_troubles(1, 3, DIRECT, CARDS)
    rows = trace_text(troubles, CARDS).splitlines()
    assert rows[0].endswith(",cut,route")
    downs = [trouble for trouble in troubles if trouble.kind == "card down"]
    assert len(downs) > 10
    assert {trouble.link for trouble in downs} == set(DIRECT)
    assert sum(row.endswith(",1,direct") for row in rows) == len(downs)
    assert sum(row.endswith(",,direct") for row in rows) == len(downs)  # it comes back


@pytest.mark.parametrize("seed", range(3))
def test_runs_that_start_again_meet_no_cut_which_would_hold_for_their_first_life_alone(seed):
    kinds = {trouble.kind for trouble in draw_troubles(seed, 3, DIRECT, KILLS)}
    assert kinds == {"slow", "narrow", "unsteady"}


def test_ranks_die_in_every_other_run_and_cards_in_the_others():
    assert [ALL.of_run(number) for number in range(3)] == [KILLS, CARDS, KILLS]
    assert [PLAIN.of_run(number) for number in range(2)] == [PLAIN, PLAIN]
    assert Features(False, True).of_run(0) == CARDS


def test_what_a_configuration_knows_is_found_out_by_asking_it():
    features = known_features()
    assert len(features.overrides()) == 1 + features.direct_cuts
