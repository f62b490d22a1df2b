"""SIGTERM asks; a second one, or the deadline, ends."""

import signal
import threading

import pytest

from jaxmorph.training import save_times
from jaxmorph.training.save_times import heeding_sigterm

LIMIT_S = 30


@pytest.fixture
def ended(monkeypatch):
    """Exit codes of this process, had it ended."""
    codes, has_ended = [], threading.Event()

    def end(code):
        codes.append(code)
        has_ended.set()

    monkeypatch.setattr(save_times.os, "_exit", end)
    return codes, has_ended


def test_the_first_one_asks_and_the_second_one_ends(ended, capsys):
    codes, _ = ended
    with heeding_sigterm(within_s=1e4) as asked:
        assert not asked()
        signal.raise_signal(signal.SIGTERM)
        assert asked()
        assert codes == []
        signal.raise_signal(signal.SIGTERM)
        assert codes == [143]
    assert "ended by SIGTERM before the state was saved" in capsys.readouterr().err


def test_who_is_asked_has_a_deadline(ended):
    codes, has_ended = ended
    with heeding_sigterm(within_s=0.01):
        signal.raise_signal(signal.SIGTERM)
        assert has_ended.wait(LIMIT_S)
    assert codes == [143]


def test_who_ends_in_time_meets_no_deadline_and_signals_are_as_before(ended):
    before = signal.getsignal(signal.SIGTERM)
    threads = threading.active_count()
    with heeding_sigterm(within_s=1e4):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(LIMIT_S)
    assert threading.active_count() == threads
    assert ended[0] == []


def test_without_a_deadline_it_interrupts_as_ctrl_c_does(ended):
    before = signal.getsignal(signal.SIGTERM)
    with heeding_sigterm(within_s=None) as asked:
        assert not asked()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
    assert ended[0] == []


@pytest.mark.parametrize("within_s", [None, 1e4])
def test_a_handler_that_python_did_not_set_leaves_the_default(monkeypatch, within_s):
    """One that was installed from C is None to Python, which takes no None back."""
    install, before = signal.signal, signal.getsignal(signal.SIGTERM)

    def of_c(number, handler):
        assert handler is not None
        previous = install(number, handler)
        return None if previous == before else previous

    monkeypatch.setattr(signal, "signal", of_c)
    try:
        with heeding_sigterm(within_s):
            assert signal.getsignal(signal.SIGTERM) is not before
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        install(signal.SIGTERM, before)
