import math
from pathlib import Path

import pytest

from jaxmorph.config.link_sections import Emulation
from jaxmorph.records import RunSummary
from jaxmorph.report.text import (
    describe_regime,
    describe_routes,
    duration,
    percent,
    short_count,
    sparkline,
    summary_rows,
)


def test_a_sparkline_rises_and_falls_with_its_values():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([8, 8, 4, 4, 1, 1], 3) == "█▄▁"
    assert sparkline([1, math.nan, 2, math.inf], 10) == "▁ █ "
    assert sparkline([3, 3], 10) == "▁▁"
    assert sparkline([], 10) == ""


def test_routes_name_the_links_that_differ():
    assert describe_routes({}) == "-"
    assert describe_routes({"0-1": "direct", "1-2": "direct"}) == "direct"
    routes = {"0-1": "direct", "1-2": "direct", "2-3": "delegated"}
    assert describe_routes(routes) == "2-3 delegated, else direct"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "0.2 s"), (42.12, "42.1 s"), (187, "3:07"), (3727, "1:02:07")]
)
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text


def test_counts_and_shares_are_short():
    assert [short_count(n) for n in (842, 1_236, 999_700, 124_439_808, 6_700_000_000)] == [
        "842", "1.24 k", "1 M", "124 M", "6.7 B",
    ]  # fmt: skip
    assert (percent(0.1234), percent(None)) == ("12.3 %", "-")


def test_the_regime_says_whether_ops_are_paced():
    assert describe_regime(Emulation()).startswith("unpaced")
    paced = Emulation.model_validate(
        {"accelerator": {"forward_ms": 10, "backward_input_ms": [9, 11.5], "backward_weight_ms": 8}}
    )
    assert describe_regime(paced) == "paced: F 10 ms, B 9 11.5 ms, W 8 ms"
    sized = Emulation.model_validate({"preset": "h800", "message_bytes": 10**7})
    assert describe_regime(sized).endswith(
        "; messages of 9.5 MiB, copied at 63 GB/s where delegated, a wire of 400 Gb/s"
    )


def test_a_summary_compares_measured_and_planned_steps():
    summary = RunSummary(
        (5.5, 2.25), 61.0, 0.4, 0.39, 0.12, 0.11, 9000.0, Path("runs/a"),
        longer_than_planned=0.026,
    )  # fmt: skip
    rows = dict(summary_rows(summary))
    assert rows["steps"] == "2 in 1:01"
    assert rows["loss"].startswith("5.5000 → 2.2500")
    assert rows["step time"] == "400.0 ms measured (median), 390.0 ms planned (+2.6 %)"
    assert rows["bubble"] == "12.0 % measured, 11.0 % planned"
    assert "picture" not in rows
