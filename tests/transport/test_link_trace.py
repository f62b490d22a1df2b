import pytest

from jaxmorph.emulation.link_trace import read_link_trace
from jaxmorph.errors import UserError
from jaxmorph.transport.link_emulator import LinkCondition, LinkEmulator

HEADER = "time_s,between,latency_ms,bandwidth_mbps,jitter_ms,cut\n"


def read(tmp_path, rows, header=HEADER):
    path = tmp_path / "trace.csv"
    path.write_text(header + rows)
    return read_link_trace(path)


def test_a_row_holds_until_the_next_of_the_same_link(tmp_path):
    found = read(tmp_path, "0,2-3,30,100,2,0\n5,1-2,7,,,\n\n10,2-3,,,,1\n12.5,2-3,0,,,false\n")
    assert found == [
        LinkCondition((2, 3), 30.0, 100.0, 2.0, from_s=0.0, to_s=10.0),
        LinkCondition((1, 2), 7.0, from_s=5.0),
        LinkCondition((2, 3), cut=True, from_s=10.0, to_s=12.5),
        LinkCondition((2, 3), from_s=12.5),
    ]


def test_a_direction_has_rows_of_its_own_beside_those_of_the_link(tmp_path):
    found = read(tmp_path, "0,2-3,10,,,\n0,3>2,20,,,\n4,3>2,0,,,\n")
    emulator = LinkEmulator(found)
    late_s = [emulator.departure_s(3, 2, (0, 0), 0, now_s) for now_s in (1.0, 5.0)]
    assert late_s == pytest.approx([1.03, 5.01])
    assert emulator.departure_s(2, 3, (0, 0), 0, 1.0) == pytest.approx(1.01)


def test_an_empty_table_emulates_nothing(tmp_path):
    assert read(tmp_path, "") == []


def test_rows_may_go_by_step_name_several_links_and_have_the_columns_that_are_needed(tmp_path):
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


def test_columns_after_the_first_two_stand_in_any_order(tmp_path):
    (found,) = read(tmp_path, "2.5,0 - 1,1,40\n", header="time_s,between,cut,latency_ms\n")
    assert found == LinkCondition((0, 1), 40.0, cut=True, from_s=2.5)


def test_a_route_has_rows_of_its_own_beside_those_of_both(tmp_path):
    rows = "0,2-3,1,direct\n1,2-3,,delegated\n4,2-3,,direct\n5,2-3,1,\n"
    assert read(tmp_path, rows, header="time_s,links,cut,route\n") == [
        LinkCondition((2, 3), cut=True, from_s=0.0, to_s=4.0, route="direct"),
        LinkCondition((2, 3), from_s=1.0, route="delegated"),
        LinkCondition((2, 3), from_s=4.0, route="direct"),
        LinkCondition((2, 3), cut=True, from_s=5.0),
    ]


def test_a_route_that_there_is_not_is_an_error(tmp_path):
    expected = "line 2: route: got 'wire', expected both, direct, delegated, or nothing"
    with pytest.raises(UserError, match=expected):
        read(tmp_path, "0,2-3,wire\n", header="time_s,links,route\n")


ERRORS = {
    "x,2-3,,,,": "line 2: time_s: got 'x', expected a number of at least 0",
    ",2-3,,,,": "line 2: time_s: got '', expected a number of at least 0",
    "0,2-2,,,,": "line 2: between: got '2-2', expected two ranks such as 2-3, or 2>3 for one",
    "0,2_3,,,,": "line 2: between: got '2_3', expected two ranks",
    "0,²-3,,,,": "line 2: between: got '²-3', expected two ranks",
    "0,2-3,-1,,,": "line 2: latency_ms: got '-1', expected a number of at least 0",
    "0,2-3,inf,,,": "line 2: latency_ms: got 'inf', expected a number of at least 0",
    "0,2-3,,0,,": "line 2: bandwidth_mbps: got '0', expected a number above 0, or nothing",
    "0,2-3,,,,yes": "line 2: cut: got 'yes', expected 0, 1, false, true, or nothing",
    "0,2-3,1": "line 2: row: got '0,2-3,1', expected 6 cells: time_s,between,latency_ms,",
    "0,2-3 2-3,1,,,": "line 2: time_s: got '0', expected more than the 0 of the row before it of",
    "3,2-3,,,,\n\n3,2-3,,,,": (
        "line 4: time_s: got '3', expected more than the 3 of the row before it of 2-3"
    ),
}


@pytest.mark.parametrize("rows", ERRORS)
def test_a_wrong_line_is_told_in_one_line(tmp_path, rows):
    with pytest.raises(UserError) as caught:
        read(tmp_path, rows)
    assert str(caught.value).startswith(f"{tmp_path / 'trace.csv'}: {ERRORS[rows]}")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("1.5,0-1,3", "line 2: step: got '1.5', expected a whole number of at least 0"),
        (",0-1,3", "line 2: step: got '', expected a whole number of at least 0"),
        ("1,0-1 1,3", "line 2: links: got '1', expected two ranks such as 2-3, or 2>3"),
        ("1,,3", "line 2: links: got '', expected two ranks such as 2-3, or 2>3"),
        ("1,0-1,3,4", "line 2: row: got '1,0-1,3,4', expected 3 cells: step,links,latency_ms"),
        ("7,0-1,3\n7,1-2,0\n5,0-1,0", "line 4: step: got '5', expected more than the 7 of the row"),
    ],
)
def test_a_wrong_line_of_a_table_by_step_is_told_in_one_line(tmp_path, rows, says):
    with pytest.raises(UserError) as caught:
        read(tmp_path, rows, header="step,links,latency_ms\n")
    assert str(caught.value).startswith(f"{tmp_path / 'trace.csv'}: {says}")


@pytest.mark.parametrize(
    "header",
    ["time,link", "step,links", "step,latency_ms,links", "step,links,cut,cut", "links,step,cut"],
)
def test_another_header_is_told_in_one_line(tmp_path, header):
    with pytest.raises(UserError) as caught:
        read(tmp_path, "", header=f"{header}\n")
    expected = f"line 1: header: got '{header}', expected time_s or step, links, then some of laten"
    assert expected in str(caught.value)


def test_no_table_at_all_is_told_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"line 1: header: got '', expected time_s or step, links"):
        read(tmp_path, "", header="# nothing\n")
    with pytest.raises(UserError, match=r"nope.csv: No such file or directory, expected a table"):
        read_link_trace(tmp_path / "nope.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"not UTF-8 text \(byte 0 is 0xff\), expected a table of"):
        read_link_trace(tmp_path / "bytes.csv")
