"""The first signal asks a process to save and end, the second ends it at once."""

import signal
import threading

import pytest

from jaxmorph.runtime import stop_signals
from jaxmorph.runtime.stop_signals import STOPS, signals_ask, signals_interrupt

LIMIT_S = 30


@pytest.fixture(autouse=True)
def handlers():
    """As on a terminal: a background job may ignore some signals."""
    before = [signal.signal(number, signal.SIG_DFL) for number in STOPS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip(STOPS, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def ended(monkeypatch):
    """The exit codes with which this process would have ended."""
    codes, has_ended = [], threading.Event()

    def end(code):
        codes.append(code)
        has_ended.set()

    monkeypatch.setattr(stop_signals.os, "_exit", end)
    return codes, has_ended


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (signal.SIGTERM, signal.SIGTERM, 143),
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGHUP, signal.SIGTERM, 143),
        (signal.SIGTERM, signal.SIGINT, 130),
    ],
)
def test_a_second_signal_ends_at_once(ended, capsys, first, second, code):
    codes, _ = ended
    event = threading.Event()
    with signals_ask(within_s=1e4, asked=event) as asked_by:
        assert asked_by() is None
        signal.raise_signal(first)
        assert asked_by() == first
        assert event.is_set()
        assert codes == []
        signal.raise_signal(second)
        assert codes == [code]
    assert f"ended by {second.name} before the state was saved" in capsys.readouterr().err


def test_a_closed_terminal_may_signal_twice(ended):
    with signals_ask(within_s=1e4) as asked_by:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert asked_by() == signal.SIGHUP
    assert ended[0] == []


def test_a_stop_has_a_deadline(ended):
    codes, has_ended = ended
    with signals_ask(within_s=0.01):
        signal.raise_signal(signal.SIGTERM)
        assert has_ended.wait(LIMIT_S)
    assert codes == [143]


def test_ending_in_time_restores_signals(ended):
    before = [signal.getsignal(number) for number in STOPS]
    threads = threading.active_count()
    with signals_ask(within_s=1e4):
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(number) for number in STOPS] == before
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(LIMIT_S)
    assert threading.active_count() == threads
    assert ended[0] == []


@pytest.mark.parametrize("number", STOPS, ids=lambda number: number.name)
def test_without_a_deadline_signals_interrupt(ended, number):
    before = signal.getsignal(number)
    with signals_ask(within_s=None) as asked_by:
        assert asked_by() is None
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    with signals_interrupt(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    assert signal.getsignal(number) == before
    assert ended[0] == []


def test_an_ignored_signal_stays_ignored():
    """As by `nohup`."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_interrupt():
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("within_s", [None, 1e4])
def test_a_foreign_handler_becomes_the_default(monkeypatch, within_s):
    """Python sees a handler installed from C as None, and can't set None."""
    install, before = signal.signal, signal.getsignal(signal.SIGTERM)

    def of_c(number, handler):
        assert handler is not None
        previous = install(number, handler)
        return None if number == signal.SIGTERM and previous == before else previous

    monkeypatch.setattr(signal, "signal", of_c)
    with signals_ask(within_s):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_other_threads_handle_no_signals():
    """Only the main thread may."""
    found = []

    def ask():
        with signals_ask(within_s=1e4) as asked_by:
            found.append(asked_by())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(LIMIT_S)
    assert found == [None]
