import io

from rich.console import Console

from jaxmorph.control.answer import solve
from jaxmorph.report.answers import print_comparison
from jaxmorph.schedule.problem import parse_problem

FIELDS = {
    "name": "x", "num_stages": 4, "num_microbatches": 12, "forward_ms": 10,
    "backward_input_ms": 10, "backward_weight_ms": 10, "link_ms": [0, 0, 20],
}  # fmt: skip


def _printed(*names, **changes):
    answers = {
        name: solve(parse_problem({**FIELDS, **changes, "schedule": name})) for name in names
    }
    shown = io.StringIO()
    print_comparison(answers, {}, Console(file=shown, width=30))
    return shown.getvalue().splitlines()


def test_a_comparison_is_one_table():
    assert _printed("1f1b", "zb-h2") == [
        "       makespan  lower bound    gap  bubble rate  warm-ups  peak live",
        "1f1b   690.0 ms     410.0 ms  68.3%        47.8%  4 3 2 1   4 3 2 1",
        "zb-h2  460.0 ms     410.0 ms  12.2%        21.7%  7 5 3 1   7 5 3 1",
    ]


def test_jitter_adds_a_column():
    heading, row = _printed("1f1b", link_jitter_ms=0)
    assert "with jitter" in heading
    assert row.count("690.0 ms") == 2
