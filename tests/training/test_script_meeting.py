import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys
from jaxmorph.errors import UserError
from jaxmorph.training.script_meeting import end_if_failed, end_on_uncaught_errors
end_on_uncaught_errors()
atexit.register(print, "cleaned up")
try:
    raise KeyError("caught")
except KeyError:
    print("went on")
"""


@pytest.mark.parametrize(
    ("ends", "code", "last_line"),
    [
        ("raise UserError('batch: a wombat')", 2, "jaxmorph.errors.UserError: batch: a wombat"),
        ("raise ArithmeticError('upside down')", 1, "ArithmeticError: upside down"),
    ],
)
def test_an_uncaught_error_is_printed_and_nothing_is_cleaned_up(ends, code, last_line):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + ends],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert done.stderr.splitlines()[-1] == last_line
    assert done.stdout == "went on\n"


@pytest.mark.parametrize(
    ("code", "ends_with", "cleaned_up"),
    [("3", 3, ""), ("'no data'", 1, ""), ("0", 0, "cleaned up\n"), ("None", 0, "cleaned up\n")],
)
def test_exiting_with_a_failure_cleans_nothing_up_either(code, ends_with, cleaned_up):
    done = subprocess.run(
        [sys.executable, "-c", f"{SCRIPT}end_if_failed(SystemExit({code}))"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == ends_with
    assert done.stdout == f"went on\n{cleaned_up}"
    assert done.stderr == ("no data\n" if "data" in code else "")
