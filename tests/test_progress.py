"""What a process does is read by others; they find that it made no progress."""

import math
import os
import signal
import subprocess
import time

import pytest

from jaxmorph.progress import GRACE_S, Page, Progress, Silence, Stall, is_stopped


@pytest.fixture
def progress():
    own = Progress()
    fd = own.share()
    yield own
    os.close(fd)


def test_silence_lasts_until_the_count_grows():
    silence = Silence(3, 10.0).after(3, 11.0).after(3, 12.5)
    assert silence == Silence(3, 12.5, 2.5)
    assert silence.after(4, 13.0) == Silence(4, 13.0)


def test_a_reader_that_was_stopped_has_seen_little_silence():
    assert Silence(3, 10.0).after(3, 3600.0).lasts_s == 2.0


def test_nothing_is_due_before_a_phase(progress):
    assert Page(progress.fd).look(time.monotonic() + 1000) == math.inf


def test_a_phase_limits_the_time_between_stamps(progress):
    page, now_s = Page(progress.fd), time.monotonic()
    progress.phase("restores the checkpoint", 2.0)
    assert page.look(now_s) == 2.0 + GRACE_S
    assert page.look(now_s + 1) == 1.0 + GRACE_S
    progress.stamp("part 3 of 4")
    assert page.look(now_s + 2) == 2.0 + GRACE_S
    progress.phase("ends", 0.0)
    assert page.look(now_s + 3) == math.inf


def test_an_inner_limit_never_shortens_the_outer_one(progress):
    progress.phase("between steps", 7.0)
    with progress.within(3.0, "step 5"):
        assert progress.limit_s == 7.0
    with progress.within(9.0):
        assert progress.limit_s == 9.0
    assert progress.limit_s == 7.0


def test_others_read_what_the_process_does(progress):
    progress.phase("step 5", 1.0)
    progress.stamp("waits for its queue")
    progress.stamp_queue("F3")
    progress.publish()
    assert Page(progress.fd).doing == "step 5, waits for its queue, its queue is at F3"


def test_words_too_long_for_the_page_are_cut(progress):
    progress.phase("ä" * 500, 1.0)
    assert len(Page(progress.fd).doing) < 500


def test_a_page_taken_over_keeps_what_is_due(progress):
    other = Progress()
    other.phase("loads", 4.0)
    assert other.share(os.dup(progress.fd)) == other.fd
    assert Page(progress.fd).doing == "loads"
    assert Page(progress.fd).look(time.monotonic()) <= 4.0 + GRACE_S


def test_others_leave_a_stalled_process_time_to_end_itself(progress):
    # Whole seconds: sums of others are rounded.
    page, now_s = Page(progress.fd), float(math.ceil(time.monotonic()))
    progress.phase("step 5", 1.0)
    page.look(now_s)
    looks = [page.stalled(os.getpid(), now_s + seconds) for seconds in range(1, 12)]
    found = [at for at, stall in enumerate(looks, start=1) if stall]
    assert found[0] == 1.0 + GRACE_S + 2 + 1
    assert looks[-1] == Stall(11.0, "step 5")


def test_a_stopped_process_is_known_as_stopped():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)
    stall = Stall(65.2, "step 5", is_stopped=True)
    assert str(stall) == (
        "stalled: no progress for 65 s, step 5; its process is stopped, as by SIGSTOP"
    )
