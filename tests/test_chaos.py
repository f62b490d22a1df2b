"""How the benchmarks of faults deal their faults, and judge what comes of them."""

import json
import random
from itertools import pairwise

import pytest

from benchmarks.chaos.faults import (
    CUTS,
    KINDS,
    LINK_KINDS,
    MOMENTS,
    Dealer,
    draw_link_faults,
)
from benchmarks.chaos.judgement import WHOLE_RUN, Outcome, attribute, missed, table_of, too_few
from benchmarks.flipped_bits import IN_TURNS, groups_of
from benchmarks.flipped_bits import KINDS as FILES
from benchmarks.results import write_json


def test_each_kind_is_dealt_as_often_as_it_is_needed():
    dealer = Dealer(random.Random(3), dict.fromkeys(KINDS, 10))
    without_ranks = {name for name, kind in KINDS.items() if kind.ends != "ranks"}
    _deal(dealer, 10 * len(without_ranks), ranks_end=False)
    assert dealer.counts == dict.fromkeys(without_ranks, 10)
    _deal(dealer, 10 * (len(KINDS) - len(without_ranks)), ranks_end=True)
    assert dealer.counts == dict.fromkeys(KINDS, 10)
    _deal(dealer, 50, ranks_end=True)
    assert all(KINDS[kind].ends == "nothing" for kind, n in dealer.counts.items() if n > 10)


def _deal(dealer, number, *, ranks_end):
    for _ in range(number):
        dealer.counts[dealer.deal(ranks_end=ranks_end)] += 1


def test_only_the_needed_kinds_are_dealt():
    dealer = Dealer(random.Random(0), {"rank killed": 2, "link cut": 0})
    assert dealer.deal(ranks_end=True) == "rank killed"
    assert dealer.deal(ranks_end=False) is None


def test_ranks_may_end_in_a_run_unless_more_cuts_are_missing():
    dealer = Dealer(random.Random(0), {"rank killed": 10, "link cut": 10})
    assert dealer.ranks_may_end()
    dealer.counts["rank killed"] = 1
    assert not dealer.ranks_may_end()
    dealer.counts["link cut"] = 9
    assert dealer.ranks_may_end()
    assert Dealer(random.Random(0), {"rank killed": 1}).ranks_may_end()
    assert not Dealer(random.Random(0), {"sidecar killed": 1, "link cut": 0}).ranks_may_end()


@pytest.mark.parametrize("ranks_end", [True, False])
def test_everything_is_killed_at_each_moment(ranks_end):
    dealer = Dealer(random.Random(3), {})
    moments = {dealer.moment(ranks_end=ranks_end) for _ in MOMENTS}
    assert moments == {*MOMENTS} - ({"failover"} if ranks_end else set())


def test_links_have_all_kinds_of_faults_that_are_wanted():
    faults = draw_link_faults(random.Random(0), 3, ["1-2"], LINK_KINDS)
    assert {each.kind for each in faults} == {*LINK_KINDS}
    assert {each.link for each in faults if each.kind == "card down"} == {"1-2"}
    assert all(a.ends_s < b.begins_s for a, b in pairwise(faults))
    whole = [each for each in LINK_KINDS if each not in CUTS]
    assert {each.kind for each in draw_link_faults(random.Random(0), 3, [], whole)} == {*whole}
    assert draw_link_faults(random.Random(0), 3, [], []) == ()


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
    needed = {"rank killed": 2, "disk full": 2, "link cut": 0}
    assert too_few(table, needed, 4) == ["disk full: 1 of 2", "faults in all: 3 of 4"]
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


def test_json_has_one_record_a_line(tmp_path):
    values = {"load": 1, "runs": [{"seed": 0, "faults": [{"kind": "a", "leaks": []}, {}]}], "b": []}
    write_json(tmp_path / "values.json", values)
    text = (tmp_path / "values.json").read_text()
    assert json.loads(text) == values
    assert '    {"kind": "a", "leaks": []},\n    {}\n' in text


def test_json_has_text_for_keys(tmp_path):
    write_json(tmp_path / "values.json", {1024: {"raw": {"median": 2.0}}})
    assert json.loads((tmp_path / "values.json").read_text()) == {"1024": {"raw": {"median": 2.0}}}
