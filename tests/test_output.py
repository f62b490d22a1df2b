"""A reader that stops, closes or is slow neither blocks nor fails what writes to it."""

import contextlib
import io
import os
import pty
import subprocess
import sys
import threading

import pytest

from jaxmorph import output
from jaxmorph.output import BestEffortOutput, best_effort, drain, write_stderr

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pipe():
    """The reading end, and a stream that writes to the other one."""
    reading, writing = os.pipe()
    stream = BestEffortOutput(writing, "utf-8")
    yield reading, stream
    with contextlib.suppress(OSError):
        os.close(reading)
    # Its thread would write what waits to the next file of this number.
    stream.drain(patience_s=30.0)
    assert stream._num_pending_bytes == 0
    with contextlib.suppress(OSError):
        os.close(writing)


def test_all_arrives_in_its_order(pipe):
    reading, stream = pipe
    for number in range(100):
        stream.write(f"line {number} → ü\n")
    stream.drain()
    lines = os.read(reading, 1 << 16).decode().splitlines()
    assert lines == [f"line {number} → ü" for number in range(100)]


def test_a_stopped_reader_blocks_nobody(pipe):
    reading, stream = pipe
    for number in range(400):
        stream.write(f"{number:07d}\n" * 1000)  # in all three times what is kept
    stream.drain(patience_s=0.05)
    received = bytearray()
    while len(received) < 1000 * 8 * 50:
        received += os.read(reading, 1 << 16)
    kept = [int(line) for line in received.split(b"\n")[: 1000 * 50 : 1000]]
    assert kept == list(range(50))  # the first, whole


def test_a_reader_that_goes_on_gets_what_waited(pipe):
    reading, stream = pipe
    stream.write("a" * 500_000)
    stream.drain(patience_s=0.05)
    received = bytearray()
    reader = threading.Thread(target=lambda: received.extend(_read(reading, 500_000)))
    reader.start()
    stream.drain(patience_s=30.0)
    reader.join(30.0)
    assert len(received) == 500_000


def _read(fd, num_bytes):
    received = b""
    while len(received) < num_bytes:
        received += os.read(fd, 1 << 16)
    return received


def test_a_gone_reader_is_reported_once(monkeypatch):
    reported, gone = [], threading.Event()
    monkeypatch.setattr(output, "write_stderr", lambda line: (reported.append(line), gone.set()))
    reading, writing = os.pipe()
    stream = BestEffortOutput(writing, "utf-8", "it was closed")
    os.close(reading)
    stream.write("one\n")
    assert gone.wait(30.0)
    stream.write("two\n")
    stream.drain(patience_s=30.0)
    os.close(writing)
    assert reported == ["it was closed"]


def test_a_signal_handler_may_write_too(pipe):
    reading, stream = pipe
    with stream._changed:  # as where a handler interrupts `write`
        stream.write("from a handler\n")
    stream.drain()
    assert os.read(reading, 100) == b"from a handler\n"


def test_streams_without_a_descriptor_stay(monkeypatch):
    shown = io.StringIO()
    assert best_effort(shown) is shown
    monkeypatch.setattr(sys, "stderr", shown)
    write_stderr("a line")
    drain(shown)
    assert shown.getvalue() == "a line\n"
    monkeypatch.setattr(sys, "stderr", None)
    write_stderr("for no reader")


WRITER = """
import sys
from jaxmorph.output import best_effort, write_stderr
stream = best_effort(sys.stdout)
for number in range(1000):
    print("x" * 200, file=stream)
write_stderr("the end")
"""


@pytest.mark.parametrize(
    "reader", ["a stopped pager", pytest.param("Ctrl-S", marks=pytest.mark.long)]
)
def test_a_process_ends_though_nobody_reads(reader):
    """Its own standard output, then its standard error too, take nothing."""
    reading, writing = os.pipe() if reader == "a stopped pager" else pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", WRITER], stdout=writing, stderr=writing)
    try:
        assert process.wait(50) == 0
    finally:
        process.kill()
        os.close(reading)
        os.close(writing)
