"""What is known of a process that tells something, hangs or dies; none of these imports JAX."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmorph.gpu_check.child_process import ask

ROOT = Path(__file__).parents[2]
LONG_S = 60.0
IN_TIME = "from jaxmorph.gpu_check.child_process import end_in_time; "


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def told_by(code, limit_s=LONG_S):
    return ask([sys.executable, "-c", code], limit_s)


def test_what_was_told_is_known_and_what_libraries_write_is_not():
    told = told_by('print("loading...\\n[1]"); print(\'{"a": 1}\'); print(\'{"b": [2]}\')')
    assert told.lines == [{"a": 1}, {"b": [2]}]
    assert told.trouble == ""


def test_what_was_told_before_a_process_died_is_known():
    code = 'import os, sys; print(\'{"a": 1}\', flush=True); sys.stderr.write("no\\nfault\\n"); '
    assert told_by(code + "sys.stderr.flush(); os._exit(3)").lines == [{"a": 1}]
    assert told_by(code + "os._exit(3)").trouble == "its process ended with 3: no | fault"
    assert told_by(code + "os.kill(os.getpid(), 9)").trouble.startswith("its process ended with -9")


def test_a_process_that_hangs_ends_and_says_where():
    code = "import threading\ndef here():\n    threading.Event().wait()\n"
    told = told_by(f"{IN_TIME}end_in_time(0.2); print('{{}}', flush=True)\n{code}here()", 0.2)
    assert told.lines == [{}]
    assert told.trouble.startswith("it hung for 0.2 s: File ")
    assert "in here" in told.trouble


def test_a_process_that_does_not_end_itself_is_ended(monkeypatch):
    monkeypatch.setattr("jaxmorph.gpu_check.child_process._GRACE_S", 0.2)
    told = told_by("import threading; threading.Event().wait()", 0.1)
    assert told.trouble == "it hung for 0.1 s: where, it didn't say"


def test_a_process_ends_with_the_one_that_asks():
    code = f"{IN_TIME}end_in_time({LONG_S})\nimport threading; threading.Event().wait()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(LONG_S) == 1


def test_a_process_takes_no_more_of_a_gpu_than_it_needs(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    code = "import json, os; print(json.dumps({'it': os.environ['XLA_PYTHON_CLIENT_PREALLOCATE']}))"
    assert told_by(code).lines == [{"it": "false"}]
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
