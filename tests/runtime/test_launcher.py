"""However a rank fails, the run ends soon with the reason and leaves no process behind."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from processes import is_running

from jaxmorph.errors import RunFailedError, UserError
from jaxmorph.progress import Page, new_page
from jaxmorph.runtime import launcher, rank_process, started_rank
from jaxmorph.runtime.launcher import RankFailedError, run_ranks
from jaxmorph.runtime.rank_process import LauncherLink, RankArguments
from jaxmorph.runtime.started_rank import StartedRank, reserved_port

# None of these processes imports JAX.
pytestmark = [pytest.mark.usefixtures("ranks_find_modules"), pytest.mark.one_jax]


@pytest.fixture(autouse=True)
def hangups_arrive():
    """Under `nohup` SIGHUP is ignored, and a launcher keeps it so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def launch(behaviour, tmp_path, guilty=1, num_ranks=3):
    """Run; return the seconds it took, the ranks' process ids and the error."""
    messages, began_s = [], time.monotonic()
    try:
        run_ranks("faulty_rank", [behaviour, str(guilty)], num_ranks, tmp_path, messages.append)
        raised = None
    except (RunFailedError, UserError) as error:
        raised = error
    return time.monotonic() - began_s, [message["pid"] for message in messages], raised


def ended_within(seconds, pids):
    """Whether processes that nobody waits for have ended."""
    deadline_s = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return not any(map(is_running, pids))


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_reserved_port_can_still_be_served():
    with reserved_port() as port, socket.socket() as stranger, socket.socket() as server:
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        server.settimeout(5.0)
        with socket.create_connection(("127.0.0.1", port), timeout=5.0), server.accept()[0]:
            pass


def test_a_missing_loopback_interface_is_one_line(monkeypatch):
    monkeypatch.setattr("socket.socket.connect_ex", lambda *_: errno.ENETUNREACH)
    with pytest.raises(UserError, match=r"^127\.0\.0\.1: Network is unreachable, expected "):
        reserved_port().__enter__()


def test_the_ranks_of_a_launch_have_a_secret_that_nobody_sees(tmp_path):
    messages, before = [], open_descriptors()
    for _ in range(2):
        asked_by = run_ranks("faulty_rank", ["show secret", "0"], 2, tmp_path, messages.append)
        assert asked_by is None
    assert [(each["bytes"], each["found"]) for each in messages] == 4 * [(32, False)]
    digests = [each["digest"] for each in messages]
    assert digests[0] == digests[1] != digests[2] == digests[3]
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("raise", "rank 1 failed: ZeroDivisionError: the weights of stage 1 are upside down"),
        ("die", "rank 1 failed: ended by SIGKILL (out of memory?)"),
        ("exit", "rank 1 failed: exit code 3"),
        (
            "silent",
            "rank 1 failed: it has reported nothing; rank 0 reports: WaitedInVainError: 5 s in "
            "vain",
        ),
    ],
)
def test_a_failing_rank_ends_the_run_with_its_reason(tmp_path, behaviour, reason):
    before, began_s = open_descriptors(), time.monotonic()
    took_s, pids, raised = launch(behaviour, tmp_path)
    assert isinstance(raised, RankFailedError)
    assert raised.reason == reason
    assert f"its log: {tmp_path / 'rank_1.log'}" in str(raised)
    assert ("| last words" in str(raised)) == (behaviour == "exit")
    assert raised.noticed_s is not None
    assert began_s < raised.noticed_s < began_s + took_s
    assert not raised.asked_to_end
    assert took_s < 15
    assert not any(map(is_running, pids))
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        ("mistake", UserError, "configs/x.yaml: data.path: nothing there"),
        ("stop", RunFailedError, "nothing was finite"),
    ],
)
def test_complete_reasons_stay_one_line(tmp_path, behaviour, kind, message):
    _, _, raised = launch(behaviour, tmp_path)
    assert type(raised) is kind
    assert str(raised) == message


def test_ranks_beyond_their_time_are_ended(tmp_path):
    before, messages, seen = open_descriptors(), [], []
    look = {"on_look": lambda doing: seen.append(sorted(doing())), "within_s": 0.5}
    with pytest.raises(RankFailedError) as raised:
        run_ranks("faulty_rank", ["wait", "0"], 2, tmp_path, messages.append, **look)
    assert seen[0] == [0, 1]
    assert raised.value.reason == "rank 0 failed: still running after 0.5 s"
    assert not any(is_running(message["pid"]) for message in messages)
    assert open_descriptors() == before


def test_an_unkillable_rank_is_left_behind(tmp_path, monkeypatch):
    class Process:
        pid = 2**30  # no process has it

        def poll(self):
            return None

    monkeypatch.setattr(launcher, "_TERMINATION_S", 0.0)
    before = open_descriptors()
    fds = [*os.pipe(), os.open(os.devnull, os.O_RDONLY)]
    os.set_blocking(fds[0], False)
    page = Page(page_fd := new_page())
    os.close(page_fd)
    process: Any = Process()
    rank = StartedRank(0, process, tmp_path / "log", fds[0], fds[1], fds[2], page)
    launcher._kill_all(launcher._Watch([rank], lambda message: None))
    assert open_descriptors() == before


@pytest.mark.timeout(60)
@pytest.mark.parametrize("behaviour", ["fork and finish", "fork and die"])
def test_a_ranks_child_is_ended_and_never_waited_for(tmp_path, behaviour):
    before, messages = open_descriptors(), []
    dies = behaviour == "fork and die"
    expected = pytest.raises(RankFailedError, match="rank 0 failed: ended by SIGKILL")
    with expected if dies else contextlib.nullcontext():
        run_ranks("faulty_rank", [behaviour, "0"], 2, tmp_path, messages.append)
    (child,) = (message["pid"] for message in messages if message["kind"] == "child")
    assert ended_within(20, [child])
    assert open_descriptors() == before


@pytest.mark.timeout(60)
def test_what_a_rank_started_in_another_group_is_ended(tmp_path):
    """As its sidecar, when something has stopped that."""
    code = "import subprocess; subprocess.Popen(['sleep', '600'], process_group=0)"
    leader = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
    (left,) = (pid for pid, session in started_rank.sessions() if session == leader.pid)
    os.kill(left, signal.SIGSTOP)
    started_rank.end_sessions({leader.pid})
    leader.wait()
    assert ended_within(20, [left])


@pytest.mark.timeout(60)
def test_a_stopped_rank_is_named(tmp_path):
    """The others fail first, since they wait for it."""
    messages = []

    def stop(message):
        messages.append(message)
        if len(messages) == 2:
            (waits,) = (each["pid"] for each in messages if each["rank"] == 1)
            os.kill(waits, signal.SIGSTOP)

    with pytest.raises(RankFailedError) as raised:
        run_ranks("faulty_rank", ["be lost", "0"], 2, tmp_path, stop)
    assert raised.value.reason.startswith("rank 1 failed: stalled: no progress for ")
    assert raised.value.reason.endswith("its process is stopped, as by SIGSTOP")
    assert not any(is_running(message["pid"]) for message in messages)


def test_a_rank_that_cannot_be_started_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    before = open_descriptors()
    with pytest.raises(RunFailedError) as raised:
        run_ranks("faulty_rank", ["finish", "0"], 2, tmp_path / "file" / "logs", print)
    assert str(raised.value).startswith(f"rank 0 can't be started: {tmp_path}/file/logs: Not a dir")
    assert open_descriptors() == before


def test_a_failed_rank_is_named_without_its_log(tmp_path):
    def remove(message):
        (tmp_path / "rank_0.log").unlink()

    with pytest.raises(RankFailedError) as raised:
        run_ranks("faulty_rank", ["raise", "0"], 1, tmp_path, remove)
    assert "rank 0 failed: ZeroDivisionError" in str(raised.value)
    assert "it can't be read: No such file or directory" in str(raised.value)


@pytest.mark.parametrize(("allowed", "num_ranks", "share"), [(8, 2, "4"), (3, 2, "1"), (1, 4, "1")])
def test_ranks_share_the_available_processors(monkeypatch, allowed, num_ranks, share):
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(allowed)), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert started_rank.environment_of_ranks(num_ranks)["NPROC"] == share
    assert started_rank.environment_of_ranks(num_ranks, 4)["NPROC"] == "4"


@pytest.mark.parametrize(("of_user", "passed"), [(None, 2), ("1", None)])
def test_the_users_number_of_threads_is_kept(monkeypatch, tmp_path, of_user, passed):
    class Process:
        pid = os.getpid()

        def __init__(self, command, **_):
            self.command = command

    monkeypatch.delenv("NPROC", raising=False)
    if of_user:
        monkeypatch.setenv("NPROC", of_user)
    monkeypatch.setattr(started_rank.subprocess, "Popen", Process)
    arguments = ["module", [], tmp_path, started_rank.environment_of_ranks(64, least_threads=2), 0]
    rank = started_rank.start_rank(3, 64, "127.0.0.1:1", *arguments, shown=False)
    rank.close()
    process: Any = rank.process
    found, rest = RankArguments.parse(process.command[3:])
    assert (found.rank, found.num_threads, rest) == (3, passed, [])


def test_messages_before_an_interruption_are_delivered(tmp_path):
    all_sent, received, deadline_s = tmp_path / "all sent", [], time.monotonic() + 60

    def interrupt_at_the_second(message):
        received.append(message.get("number"))
        if message.get("number") == 1:
            while not all_sent.exists() and time.monotonic() < deadline_s:
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ranks("faulty_rank", ["talk", "0", str(all_sent)], 1, tmp_path, interrupt_at_the_second)
    assert received == [None, *range(300)]


@contextlib.contextmanager
def sigint_interrupts():
    """Make SIGINT interrupt, as on a terminal; a background job may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Finalized:
    """Sends SIGINT from its finalizer, in which Python drops exceptions."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(60)
def test_ctrl_c_during_a_finalizer_is_not_lost(tmp_path):
    received = []

    def receive(message):
        received.append(message)
        if len(received) == 1:
            Finalized()

    with sigint_interrupts():
        with pytest.raises(KeyboardInterrupt):
            run_ranks("faulty_rank", ["wait", "0"], 2, tmp_path, receive)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait(tmp_path, monkeypatch):
    before, pids = open_descriptors(), []

    def interrupt_once_all_are_deaf(message):
        pids.append(message["pid"])
        if len(pids) == 2:
            raise KeyboardInterrupt

    def interrupt_again(watch, deadline_s):
        assert [rank.process.poll() for rank in watch.ranks] == [None, None]
        signal.raise_signal(signal.SIGINT)
        began_s = time.monotonic()
        wait(watch, deadline_s)
        assert time.monotonic() - began_s < 1

    wait = launcher._await_all
    monkeypatch.setattr(launcher, "_await_all", interrupt_again)
    with sigint_interrupts(), pytest.raises(KeyboardInterrupt):
        run_ranks("faulty_rank", ["deaf", "0"], 2, tmp_path, interrupt_once_all_are_deaf)
    assert not any(map(is_running, pids))
    assert open_descriptors() == before


def test_two_ctrl_cs_leave_no_stuck_rank(tmp_path, monkeypatch):
    """The second one comes between the first one's exception and what ends the ranks."""
    pids, end = [], launcher._end

    def interrupt_once_all_are_deaf(message):
        pids.append(message["pid"])
        if len(pids) == 2:
            os.kill(pids[1], signal.SIGSTOP)
            signal.raise_signal(signal.SIGINT)

    def interrupt_before(watch):
        signal.raise_signal(signal.SIGINT)
        end(watch)

    monkeypatch.setattr(launcher, "_end", interrupt_before)
    with sigint_interrupts(), pytest.raises(KeyboardInterrupt):
        run_ranks("faulty_rank", ["deaf", "0"], 2, tmp_path, interrupt_once_all_are_deaf)
    left = [*filter(is_running, pids)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def terminate_at_hello(behaviour, log_dir, within_s, *numbers):
    """Send SIGTERM at a rank's first message; return what it was asked by, and messages."""
    received, asked = [], []

    def receive(message):
        received.append(message)
        if message["kind"] == "hello":
            for number in numbers or (signal.SIGTERM,):
                signal.raise_signal(number)

    before = signal.getsignal(signal.SIGTERM)
    try:
        asked_by = run_ranks(
            "faulty_rank", [behaviour, "0"], 1, log_dir, receive,
            stop_within_s=within_s, on_asked=asked.append,
        )  # fmt: skip
    finally:
        assert signal.getsignal(signal.SIGTERM) == before
        assert not is_running(received[0]["pid"])
    assert asked == [asked_by]
    return asked_by, received


@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGTERM], [signal.SIGINT], [signal.SIGHUP, signal.SIGHUP]],  # of a closed terminal
    ids=["SIGTERM", "Ctrl-C", "SIGHUP twice"],
)
def test_rank_0_is_asked_to_end_first(tmp_path, numbers):
    with sigint_interrupts():
        asked_by, received = terminate_at_hello("wait until asked", tmp_path, 60.0, *numbers)
    assert asked_by == numbers[0]
    assert received[1:] == [{"kind": "word", "asked": True}]


def test_the_second_ctrl_c_ends_at_once(tmp_path):
    with sigint_interrupts(), pytest.raises(KeyboardInterrupt):
        terminate_at_hello("wait", tmp_path, 1e4, signal.SIGINT, signal.SIGINT)


def test_a_failure_records_the_request_to_end(tmp_path):
    with pytest.raises(RankFailedError) as raised:
        terminate_at_hello("fail when asked", tmp_path, 60.0)
    assert raised.value.asked_to_end


def test_no_rank_is_asked_to_end_after_a_failure(tmp_path, monkeypatch):
    def asked(watch, deadline_s):
        signal.raise_signal(signal.SIGTERM)  # as a scheduler may while the others are ended

    monkeypatch.setattr(launcher, "_await_all", asked)
    with pytest.raises(KeyboardInterrupt):
        run_ranks("faulty_rank", ["raise", "0"], 2, tmp_path, lambda _: None, stop_within_s=60.0)


def test_ranks_that_ignore_the_request_are_interrupted(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        terminate_at_hello("wait", tmp_path, 0.05)


LAUNCHER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from jaxmorph.runtime.launcher import run_ranks

    def show(message):
        print(message["pid"], flush=True)

    run_ranks("faulty_rank", ["wait", "0"], 2, Path(sys.argv[1]), show)
    """
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_ranks_end_with_their_launcher(tmp_path, number):
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # A shell's background job ignores Ctrl-C, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as launcher:
        watchdog = threading.Timer(60, launcher.kill)
        watchdog.start()
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(number)
        launcher.wait(30)
        watchdog.cancel()
    assert ended_within(20, pids)


@pytest.mark.timeout(60)  # each message of a rank that waited would take two seconds
def test_a_launcher_that_reads_nothing_holds_up_no_rank(monkeypatch):
    monkeypatch.setattr(rank_process, "_SOON_S", 2.0)
    theirs, own = os.pipe()
    lifeline, _ = os.pipe()  # it stays open: closing it would end this process
    link = LauncherLink(RankArguments(0, 1, "", own, lifeline))
    messages = [{"kind": "step", "number": number, "text": "x" * 1000} for number in range(200)]
    for message in messages:
        link.send(message)
    link.report_failure(0, RuntimeError("out of luck"))
    with os.fdopen(theirs, encoding="utf-8") as reader:
        assert [json.loads(reader.readline()) for _ in messages] == messages
        assert json.loads(reader.readline())["reason"] == "RuntimeError: out of luck"
        assert link.flush(20.0)
