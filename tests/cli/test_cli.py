import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxmorph

VERSION = [sys.executable, "-m", "jaxmorph", "--version"]


def test_the_version_is_printed(run):
    assert run("--version") == (0, f"jaxmorph {jaxmorph.__version__}\n", "")


def test_without_arguments_the_commands_are_listed(run):
    code, out, _ = run()
    assert code == 0
    assert all(command in out for command in ("plan", "validate", "train", "model", "init"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "compare: got no configuration, expected a YAML file, or --resume RUN_DIR"),
        (["--resume", "auto"], "compare: got no configuration, expected a YAML file, or --resume"),
        (["--resume", "none"], "--resume: got none, expected a comparison's directory, with a con"),
        ([f"compare.bars=[{300 * 'x'}]", "--resume", "none"], "--resume: got none, expected a com"),
        (["a.yaml", "--redo-disturbed"], "--redo-disturbed: got no comparison, expected --resume"),
    ],
)
def test_a_comparison_that_is_not_there_is_one_line(run, words, line):
    code, _, error = run("compare", *words)
    assert code == 2
    assert error.startswith(f"error: {line}")
    assert error.count("\n") == 1


def test_a_full_disk_is_one_line():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            VERSION, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (
        1, "error: standard output: cannot be written: No space left on device\n"
    )  # fmt: skip


def test_a_closed_reader_is_no_error_message():
    """As `head` when it has read enough."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        VERSION, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_name_that_no_file_has_is_one_line(run):
    code, _, error = run("report", 300 * "x")
    assert code == 2
    assert error.startswith(f"error: {300 * 'x'}")
    assert error.endswith(": File name too long\n")
    assert error.count("\n") == 1
