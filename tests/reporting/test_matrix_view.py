import io

from rich.console import Console

from jaxmorph.reporting.matrix_view import (
    LiveMatrixView,
    PlainMatrixView,
    matrix_view,
    open_matrix_view,
)


def test_the_live_table_has_a_cell_for_each_run_and_says_what_is_being_run(made_up):
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(matrix_view(made_up, "adaptive is running"))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "step ms healthy slow" in lines
    assert "zb 402 1.00x 1,150 2.86x noisy" in lines
    assert "adaptive FAILED …" in lines
    assert "adaptive is running" in lines


def test_plain_lines_say_once_what_is_being_run(made_up):
    shown = io.StringIO()
    view = open_matrix_view(Console(file=shown, width=20))
    assert isinstance(view, PlainMatrixView)
    for doing in ("zb is starting", "zb is running", "zb is running", ""):
        view.update(made_up, doing)
    view.say("a line that is longer than the console is wide")
    view.close()
    assert shown.getvalue().splitlines() == [
        "zb is starting", "zb is running", "a line that is longer than the console is wide",
    ]  # fmt: skip


def test_a_terminal_shows_the_last_table_when_all_is_done(made_up):
    shown = io.StringIO()
    view = open_matrix_view(Console(file=shown, force_terminal=True, width=80))
    assert isinstance(view, LiveMatrixView)
    view.say("writes runs/x")
    view.update(made_up, "zb is running")
    view.close()
    view.close()
    assert "writes runs/x" in shown.getvalue()
    assert "402 1.00x" in shown.getvalue()
