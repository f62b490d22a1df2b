"""The benchmark's side of a contender, with a process that has neither JAX nor torch."""

import os
import sys

import pytest

from benchmarks.training_speed.turns import ContenderError, running
from benchmarks.training_speed.worker import WorkerOptions
from benchmarks.training_speed.workload import Workload, write_batches

COUNTS = """
from benchmarks.training_speed.worker import WorkerOptions, serve

class Counts:
    steps = 0
    def step(self, tokens, targets):
        self.steps += 1
        return self.steps
    def finish(self, losses):
        return losses
    def close(self):
        print("closed", flush=True)

serve(WorkerOptions.parse(), Counts)
"""


GONE = """
import socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    connection.sendall(b'{"ready": 0}\\n')
open(sys.argv[2], "w").close()
raise SystemExit("out of memory")
"""


def options(tmp_path):
    workload = Workload(sequence_length=4)
    write_batches(tmp_path / "batches.npy", workload, num_steps=3)
    address, unused = tmp_path / "0", tmp_path / "unused"
    return WorkerOptions(
        str(address), workload, tmp_path / "batches.npy", (0,), "any", unused, 0, 1, unused
    )


@pytest.mark.timeout(60)
def test_a_contender_waits_for_its_turns_and_ends_with_the_benchmark(tmp_path):
    told = options(tmp_path)
    command = [sys.executable, "-c", COUNTS, *told.words()]
    with running([command], 1, tmp_path, tmp_path / "0") as contender:
        first, second = contender.take_turn(2), contender.take_turn(1)
    assert (first.losses, second.losses) == ((1, 2), (3,))
    assert first.seconds > 0
    assert (tmp_path / "0.log").read_text() == "closed\n"


@pytest.mark.timeout(60)
def test_a_contender_that_does_not_start_is_told_with_its_last_words(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no torch here')"]
    with (
        pytest.raises(ContenderError, match=r"(?s)ended before it was ready.*no torch here"),
        running([command], 1, tmp_path, tmp_path / "0"),
    ):
        pass


@pytest.mark.timeout(60)
def test_a_contender_that_dies_in_its_turn_is_an_error(tmp_path):
    told = options(tmp_path)
    dying = COUNTS.replace("self.steps += 1", "raise SystemExit('out of memory')")
    command = [sys.executable, "-c", dying, *told.words()]
    with (
        pytest.raises(ContenderError, match=r"(?s)it has ended.*out of memory"),
        running([command], 1, tmp_path, tmp_path / "0") as contender,
    ):
        contender.take_turn(1)


@pytest.mark.timeout(60)
def test_a_contender_that_dies_between_its_turns_is_an_error_that_hides_no_other(tmp_path):
    address, gone = tmp_path / "0", tmp_path / "gone"
    os.mkfifo(gone)
    command = [sys.executable, "-S", "-c", GONE, str(address), str(gone)]
    with running([command], 1, tmp_path, address) as contender:
        gone.read_text()  # which waits until it has hung up
        with pytest.raises(ContenderError, match="it has ended"):
            contender.take_turn(1)
