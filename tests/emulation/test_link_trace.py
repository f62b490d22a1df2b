import json

import pytest

from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.emulation.link_trace import (
    MOST_CHANGES,
    read_link_trace,
    require_few_changes,
    require_links_of,
)
from jaxmorph.errors import UserError
from jaxmorph.placement import ALONE, Replica
from jaxmorph.records import Link
from jaxmorph.transport.link_emulator import LinkEmulator
from jaxmorph.transport.sidecar_process import _MAX_RECORD_BYTES

HEADER = "time_s,links,latency_ms,bandwidth_mbps,jitter_ms,cut\n"
BY_STEP = "step,links,latency_ms\n"


def read(tmp_path, rows, header=HEADER, replica=ALONE):
    path = tmp_path / "trace.csv"
    path.write_text(header + rows)
    return read_link_trace(path, replica)


def test_a_row_holds_until_the_links_next_row(tmp_path):
    found = read(tmp_path, "0,2-3,30,100,2,0\n5,1-2,7,,,\n\n10,2-3,,,,1\n12.5,2-3,0,,,false\n")
    assert found == [
        LinkCondition((2, 3), 30.0, 100.0, 2.0, from_s=0.0, to_s=10.0),
        LinkCondition((1, 2), 7.0, from_s=5.0),
        LinkCondition((2, 3), cut=True, from_s=10.0, to_s=12.5),
        LinkCondition((2, 3), from_s=12.5),
    ]


def test_a_direction_has_rows_of_its_own(tmp_path):
    found = read(tmp_path, "0,2-3,10,,,\n0,3>2,20,,,\n4,3>2,0,,,\n")
    emulator = LinkEmulator(found)
    late_s = [emulator.departure_s(3, 2, (0, 0), 0, now_s) for now_s in (1.0, 5.0)]
    assert late_s == pytest.approx([1.03, 5.01])
    assert emulator.departure_s(2, 3, (0, 0), 0, 1.0) == pytest.approx(1.01)


def test_an_empty_table_emulates_nothing(tmp_path):
    assert read(tmp_path, "") == []


def test_rows_by_step_may_name_several_links(tmp_path):
    rows = "15,2-3 0-1,30\n\n# healed\n85, 2-3 ,\n90,3>2,7\n"
    found = read(tmp_path, rows, header="# of an event\nstep,links,latency_ms\n")
    assert found == [
        LinkCondition((2, 3), 30.0, from_step=15, to_step=85),
        LinkCondition((0, 1), 30.0, from_step=15),
        LinkCondition((2, 3), from_step=85),
        LinkCondition((2, 3), 7.0, from_step=90, source=3),
    ]
    emulator = LinkEmulator(found)
    late_s = [emulator.departure_s(2, 3, (0, step), 0, 1.0) for step in (14, 15, 84, 85)]
    assert late_s == pytest.approx([1.0, 1.03, 1.03, 1.0])


def test_optional_columns_may_have_any_order(tmp_path):
    (found,) = read(tmp_path, "2.5,0 - 1,1,40\n", header="time_s,links,cut,latency_ms\n")
    assert found == LinkCondition((0, 1), 40.0, cut=True, from_s=2.5)


def test_a_route_has_rows_of_its_own(tmp_path):
    rows = "0,2-3,1,direct\n1,2-3,,delegated\n4,2-3,,direct\n5,2-3,1,\n"
    assert read(tmp_path, rows, header="time_s,links,cut,route\n") == [
        LinkCondition((2, 3), cut=True, from_s=0.0, to_s=4.0, route="direct"),
        LinkCondition((2, 3), from_s=1.0, route="delegated"),
        LinkCondition((2, 3), from_s=4.0, route="direct"),
        LinkCondition((2, 3), cut=True, from_s=5.0),
    ]


def test_a_replicas_link_has_rows_of_its_own(tmp_path):
    rows = "0,0-1 r1:2-3,30\n4,r1:0>1 r0:0-1,7\n6,0-1,0\n"
    of_replicas = (read(tmp_path, rows, BY_STEP, Replica(index, 2)) for index in range(2))
    first, second = of_replicas
    assert first == [
        LinkCondition((0, 1), 30.0, from_step=0, to_step=4),
        LinkCondition((0, 1), 7.0, from_step=4, to_step=6),
        LinkCondition((0, 1), from_step=6),
    ]
    assert second == [
        LinkCondition((0, 1), 30.0, from_step=0, to_step=6),
        LinkCondition((2, 3), 30.0, from_step=0),
        LinkCondition((0, 1), 7.0, from_step=4, source=0),
        LinkCondition((0, 1), from_step=6),
    ]


@pytest.mark.parametrize(
    ("link", "replica", "expected"),
    [
        ("r1:2-3", ALONE, "for one direction"),
        ("r2:2-3", Replica(0, 2), "for one direction, of replica r0 or r1"),
        ("r1:2-2", Replica(1, 2), "for one direction"),
    ],
)
def test_a_link_of_no_replica_is_refused(tmp_path, link, replica, expected):
    with pytest.raises(UserError) as caught:
        read(tmp_path, f"0,{link},30\n", BY_STEP, replica)
    says = f"line 2: links: got '{link}', expected two ranks such as 2-3, or 2>3 {expected}"
    assert str(caught.value) == f"{tmp_path / 'trace.csv'}: {says}"


NUMBER, WHOLE = "a number of at least 0", "a whole number of at least 0"
RANKS = "two ranks such as 2-3, or 2>3 for one"
LATER = "more than the {} of the row before it of"
ERRORS = [  # the table, then line, column, what was got and what was expected
    (HEADER, "x,2-3,,,,", 2, "time_s", "x", NUMBER),
    (HEADER, ",2-3,,,,", 2, "time_s", "", NUMBER),
    (HEADER, "0,2-2,,,,", 2, "links", "2-2", RANKS),
    (HEADER, "0,2_3,,,,", 2, "links", "2_3", RANKS),
    (HEADER, "0,²-3,,,,", 2, "links", "²-3", RANKS),
    (HEADER, "0,2-3,-1,,,", 2, "latency_ms", "-1", NUMBER),
    (HEADER, "0,2-3,inf,,,", 2, "latency_ms", "inf", NUMBER),
    (HEADER, "0,2-3,,0,,", 2, "bandwidth_mbps", "0", "a number above 0, or nothing"),
    (HEADER, "0,2-3,,,,yes", 2, "cut", "yes", "0, 1, false, true, or nothing"),
    (HEADER, "0,2-3,1", 2, "row", "0,2-3,1", "6 cells: time_s,links,latency_ms,"),
    (HEADER, "0,2-3 2-3,1,,,", 2, "time_s", "0", LATER.format(0)),
    (HEADER, "3,2-3,,,,\n\n3,2-3,,,,", 4, "time_s", "3", LATER.format(3) + " 2-3"),
    (BY_STEP, "1.5,0-1,3", 2, "step", "1.5", WHOLE),
    (BY_STEP, ",0-1,3", 2, "step", "", WHOLE),
    (BY_STEP, "1,0-1 1,3", 2, "links", "1", RANKS),
    (BY_STEP, "1,,3", 2, "links", "", RANKS),
    (BY_STEP, "1,0-1,3,4", 2, "row", "1,0-1,3,4", "3 cells: step,links,latency_ms"),
    (BY_STEP, "7,0-1,3\n7,1-2,0\n5,0-1,0", 4, "step", "5", LATER.format(7)),
    ("step,links,route\n", "0,2-3,wire", 2, "route", "wire", "both, direct, delegated, or nothing"),
    *(
        (f"{each}\n", "", 1, "header", each, "time_s or step, links, then some of laten")
        for each in (
            "time,link",
            "step,links",
            "step,latency_ms,links",
            "step,links,cut,cut",
            "links,step,cut",
        )
    ),
]


@pytest.mark.parametrize(("header", "rows", "line", "column", "got", "expected"), ERRORS)
def test_a_bad_line_is_reported_in_one_line(tmp_path, header, rows, line, column, got, expected):
    with pytest.raises(UserError) as caught:
        read(tmp_path, rows, header)
    says = f"{tmp_path / 'trace.csv'}: line {line}: {column}: got '{got}', expected {expected}"
    assert str(caught.value).startswith(says)
    assert str(caught.value).isprintable()


def test_a_missing_table_is_reported_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"line 1: header: got '', expected time_s or step, links"):
        read(tmp_path, "", header="# nothing\n")
    with pytest.raises(UserError, match=r"nope.csv: No such file or directory, expected a table"):
        read_link_trace(tmp_path / "nope.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"not UTF-8 text \(byte 0 is 0xff\), expected a table of"):
        read_link_trace(tmp_path / "bytes.csv")


LONGEST = 12345.678901234567  # as scaled numbers of a trace may be
MOST_LINKS = 3  # of a rank: to its neighbours, and between the first and the last


def test_the_most_changes_fit_into_one_record():
    change = LinkCondition(
        (16383, 16384), LONGEST, LONGEST, LONGEST, True, from_s=LONGEST, to_s=LONGEST, source=16383
    )
    num_bytes = len(json.dumps([vars(change)])) * MOST_CHANGES * MOST_LINKS
    assert num_bytes <= _MAX_RECORD_BYTES


def test_a_link_may_not_change_too_often():
    require_few_changes([Link(0, 1), Link(1, 2)] * MOST_CHANGES, "--steps")
    says = rf"^--steps: got {MOST_CHANGES + 1} changes of link 1-2, expected at most {MOST_CHANGES}"
    with pytest.raises(UserError, match=says):
        require_few_changes([Link(1, 2)] * (MOST_CHANGES + 1), "--steps")


def test_links_join_neighbours_and_the_ends():
    require_links_of(4, [Link(2, 3), Link(0, 3)], "--links")
    says = r"^--links: got link 1-3, expected one of 0-1, 1-2, 2-3, 0-3$"
    with pytest.raises(UserError, match=says):
        require_links_of(4, [Link(1, 3), Link(4, 5)], "--links")
    with pytest.raises(UserError, match=r"^t: got link 0-1, expected no links, for one stage$"):
        require_links_of(1, [Link(0, 1)], "t")


def test_a_quote_that_is_not_closed_is_one_line(tmp_path):
    rows = '"1,0-1,5,,,\n' + 20_000 * "2,0-1,5,,,\n"
    with pytest.raises(UserError, match=r"trace.csv: line \d+: field larger than field limit"):
        read(tmp_path, rows)
