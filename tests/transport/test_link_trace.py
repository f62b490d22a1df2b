import pytest

from jaxmorph.errors import UserError
from jaxmorph.transport.link_emulator import LinkCondition, LinkEmulator
from jaxmorph.transport.link_trace import read_link_trace

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


def test_another_header_or_no_file_is_told_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"line 1: header: got 'time,link', expected time_s,betw"):
        read(tmp_path, "", header="time,link\n")
    with pytest.raises(UserError, match=r"nope.csv: No such file or directory, expected a table"):
        read_link_trace(tmp_path / "nope.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"not UTF-8 text \(byte 0 is 0xff\), expected a table of"):
        read_link_trace(tmp_path / "bytes.csv")
