"""How the benchmarks of faults deal their faults, and judge what comes of them."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.chaos.faults import (
    CUTS,
    KINDS,
    LINK_KINDS,
    MOMENTS,
    Dealer,
    begun,
    draw_link_faults,
    kinds_of,
)
from benchmarks.chaos.judgement import WHOLE_RUN, Outcome, attribute, missed, table_of
from benchmarks.flipped_bits import IN_TURNS, groups_of
from benchmarks.flipped_bits import KINDS as FILES


@pytest.mark.parametrize("ranks_end", [True, False])
def test_each_kind_is_dealt_as_often_as_it_should_be(ranks_end):
    dealer, cards = Dealer(random.Random(3), list(KINDS)), kinds_of(ranks_end, list(KINDS))
    dealt = Counter(dealer.deal(ranks_end=ranks_end) for _ in range(10 * len(cards)))
    assert dealt == {kind: 10 * number for kind, number in Counter(cards).items()}
    assert set(dealt) == {name for name, kind in KINDS.items() if ranks_end or kind.ends != "ranks"}
    moments = {dealer.moment(ranks_end=ranks_end) for _ in MOMENTS}
    assert moments == {*MOMENTS} - ({"failover"} if ranks_end else set())


def test_only_the_wanted_kinds_are_dealt():
    dealer = Dealer(random.Random(0), ["rank killed", "link cut"])
    assert dealer.deal(ranks_end=True) == "rank killed"
    assert dealer.deal(ranks_end=False) is None


def test_links_have_all_kinds_of_faults_that_are_wanted():
    faults = draw_link_faults(random.Random(0), 3, ["1-2"], LINK_KINDS)
    assert {each.kind for each in faults} == {*LINK_KINDS}
    assert {each.link for each in faults if each.kind == "card down"} == {"1-2"}
    assert all(a.ends_s < b.begins_s for a, b in pairwise(faults))
    whole = [each for each in LINK_KINDS if each not in CUTS]
    assert {each.kind for each in draw_link_faults(random.Random(0), 3, [], whole)} == {*whole}
    assert draw_link_faults(random.Random(0), 3, [], []) == ()


def test_link_faults_count_once_per_launch_of_the_ranks():
    faults = draw_link_faults(random.Random(0), 3, ["1-2"], LINK_KINDS)
    second_s = faults[1].begins_s + 0.001
    assert list(begun(faults, [second_s, 0.0, second_s])) == 2 * [
        faults[0].kind,
        faults[1].kind,
    ]


def test_a_wrong_step_is_the_last_fault_before_it():
    outcomes = [Outcome("rank killed", 3), Outcome("disk full", 9), Outcome(WHOLE_RUN)]
    wrong = ["step 2: got 1", "step 4: got 1", "step 9: got 1", "step 10: got 1", "parameters: x"]
    attribute(wrong, outcomes)
    assert [each.wrong for each in outcomes] == [2, 1, 2]


def test_the_table_has_all_that_is_wrong():
    outcomes = [
        Outcome("rank killed", 3, recovered_s=2.0, unnamed=True),
        Outcome("rank killed", 5, recovered_s=7.04, wrong=2),
        Outcome("disk full", 7, hang="stands still", leaks=("process 1", "socket 2")),
        Outcome(WHOLE_RUN),
    ]
    table = table_of(outcomes, ["rank killed", "disk full", "link cut", WHOLE_RUN])
    assert list(table["rank killed"].values()) == [2, 7.0, 2, 0, 0, 1]
    assert list(table["disk full"].values()) == [1, None, 0, 1, 2, 0]
    assert missed(table) == 6
    assert missed(table_of([Outcome(WHOLE_RUN)], [WHOLE_RUN])) == 0


def test_flips_that_are_resumed_together_cannot_hide_one_another():
    assert sorted(IN_TURNS) == sorted(FILES)
    groups = list(groups_of(IN_TURNS, 0, 160))
    assert [number for group in groups for number, _ in group] == list(range(160))
    assert len(groups) == 60
    for group in groups:
        kinds = [kind for _, kind in group]
        assert len(set(kinds)) == len(kinds) <= 4
        assert sum(FILES[kind].startswith("checkpoints/") for kind in kinds) <= 1
        assert len(kinds) == 1 or not {"steps", "configuration"} & {*kinds}
