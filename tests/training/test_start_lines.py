import threading

import pytest

from jaxmorph.progress import progress
from jaxmorph.training import start_lines
from jaxmorph.training.start_lines import StartLines, in_words


@pytest.mark.parametrize(
    ("doing", "says"),
    [
        (["starts, waits for rank 1", "starts, compiling 4 of 7 programs"],
         "rank 1: starts, compiling 4 of 7 programs"),
        (["reads", "compiles", "reads"], "ranks 0, 2: reads; rank 1: compiles"),
        (["", "", "joins"], "ranks 0, 1: loads Python and its libraries; rank 2: joins"),
        (["waits for rank 1: sleeps", "waits for rank 0"],  # none says that it is busy
         "rank 0: waits for rank 1: sleeps; rank 1: waits for rank 0"),
        ([*"abcde"], "rank 0: a; rank 1: b; rank 2: c; and 2 more"),
    ],
)  # fmt: skip
def test_a_line_names_the_ranks_that_are_busy(doing, says):
    assert in_words(dict(enumerate(doing))) == says


def test_a_start_is_described_every_ten_seconds():
    said, now = [], [100.0]
    lines = StartLines(said.append, lambda: now[0])

    def look_until(end_s):
        while now[0] < end_s:
            now[0] += 0.25
            lines.look(lambda: {0: f"at {now[0]:g}"})

    look_until(150.0)  # nothing starts
    lines.begin()
    look_until(171.0)
    lines.end()
    look_until(200.0)
    lines.begin()
    look_until(210.0)
    assert said == ["rank 0: at 160", "rank 0: at 170", "rank 0: at 210"]


def test_a_thread_looks_until_the_start_is_over(monkeypatch):
    monkeypatch.setattr(start_lines, "_LOOK_S", 0.001)
    monkeypatch.setattr(start_lines, "_EVERY_S", 0.0)
    said = threading.Event()

    def say(line):
        assert line.startswith("reads something large")
        said.set()

    lines = StartLines(say)
    with progress.within(0.0, "reads something large"), lines.looking():
        assert said.wait(30)
        lines.end()
    lines.look(lambda: pytest.fail("a start that is over was looked at"))
