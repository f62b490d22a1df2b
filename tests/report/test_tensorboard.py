"""Reads events as TensorBoard does: records of protobufs."""

import errno
import struct
import sys
from dataclasses import replace

import pytest
from example_step import STEP
from tensorboardX.proto import event_pb2

from jaxmorph.errors import UserError
from jaxmorph.records import Event
from jaxmorph.report import tensorboard
from jaxmorph.report.run_directory import RunDirectory
from jaxmorph.report.tensorboard import TensorBoardEvents, load_writer

STEP = replace(STEP, step=3, step_s=0.5, predicted_step_s=0.25, held_out_loss=5.25)


def events_of(folder):
    """Every event of the folder's files, in their order."""
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])  # then a checksum, the event, and another
            event = data[12 : 12 + length]
            yield event_pb2.Event.FromString(event)  # pyright: ignore[reportAttributeAccessIssue]
            data = data[16 + length :]


def scalars(folder):
    return [
        (event.step, value.tag, value.simple_value)
        for event in events_of(folder)
        for value in event.summary.value
    ]


def test_each_measured_number_is_a_scalar(tmp_path):
    events = TensorBoardEvents(tmp_path)
    events.write_step(STEP)
    events.write_step(replace(STEP, step=4, grad_norm=0.0, held_out_loss=None, bubble_rate=None))
    events.write_step(replace(STEP, step=5, auxiliary={"balance": 0.75}))
    events.close()
    events.close()
    found = scalars(tmp_path)
    assert {tag: value for step, tag, value in found if step == 3} == {
        "loss": 5.0, "held_out_loss": 5.25, "grad_norm": 1.5, "step_s": 0.5,
        "tokens_per_s": 10_240.0, "bubble_rate": 0.125, "predicted_step_s": 0.25,
    }  # fmt: skip
    assert {tag for step, tag, _ in found if step == 4} == {
        "loss", "grad_norm", "step_s", "tokens_per_s", "predicted_step_s",
    }  # fmt: skip
    assert (5, "auxiliary/balance", 0.75) in found


def test_a_nan_loss_is_written(tmp_path):
    events = TensorBoardEvents(tmp_path)
    events.write_step(replace(STEP, loss=float("inf")))
    events.close()
    assert (3, "loss", float("inf")) in scalars(tmp_path)


def test_steps_are_on_disk_at_a_checkpoint(tmp_path):
    with RunDirectory(tmp_path, tensorboard=TensorBoardEvents(tmp_path)) as directory:
        directory.write_step(STEP)
        directory.show_event(Event(0.5, 3, "checkpoint_saved"))
        assert (3, "loss", 5.0) in scalars(tmp_path)
        directory.write_step(replace(STEP, step=4))
    assert [step for step, tag, _ in scalars(tmp_path) if tag == "loss"] == [3, 4]


def test_a_resumed_run_hides_repeated_steps(tmp_path):
    for first_step in (0, 3):
        events = TensorBoardEvents(tmp_path, first_step)
        events.write_step(STEP)
        events.close()
    starts = [event for event in events_of(tmp_path) if event.HasField("session_log")]
    assert [event.step for event in starts][-1] == 3
    assert len([1 for step, tag, _ in scalars(tmp_path) if (step, tag) == (3, "loss")]) == 2


def test_a_missing_library_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UserError) as caught:
        load_writer()
    assert str(caught.value) == (
        "metrics.tensorboard: got true without tensorboardX, expected it to be installed: "
        "pip install tensorboardX"
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_holds_up_no_step(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "_FLUSH_S", 0.01)
    events = TensorBoardEvents(tmp_path)
    writer = events._writer.file_writer.event_writer

    def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(writer._ev_writer, "flush", fail)
        events.write_step(STEP)
        writer._worker.join(20)
        assert not writer._worker.is_alive()
        for step in range(50):
            events.write_step(replace(STEP, step=step))
        with pytest.raises(OSError, match="No space left"):
            events.close()
    events.write_step(replace(STEP, step=50))  # to a new file
    events.close()
    assert (50, "loss", 5.0) in scalars(tmp_path)
