"""All ranks save, and end, after the same step, whoever knew of it."""

import signal
import threading

import pytest

from jaxmorph.config.checkpoint_section import Checkpoint
from jaxmorph.training import save_times
from jaxmorph.training.save_times import AfterStep, SaveTimes, heeding_sigterm

NOTHING, SAVES = AfterStep(saves=False, stops=False), AfterStep(saves=True, stops=False)
STOPS = AfterStep(saves=True, stops=True)
LIMIT_S = 30


class Ranks:
    """Two ranks that meet after each step, with clocks that differ."""

    def __init__(self, num_steps=20, **settings):
        self.clocks, self.asked, self.step = [0.0, 0.0], [False, False], 0
        self.times = [
            SaveTimes(
                Checkpoint(**settings), num_steps, leads=rank == 0,
                stop_asked=lambda rank=rank: self.asked[rank],
                clock=lambda rank=rank: self.clocks[rank],
            )
            for rank in (0, 1)
        ]  # fmt: skip

    def after_step(self, rank_0_s=1.0, rank_1_s=1.0):
        """What comes after the next step, which is the same on both."""
        self.clocks = [self.clocks[0] + rank_0_s, self.clocks[1] + rank_1_s]
        self.step += 1
        reports = [{"loss": 1.0, **times.told()} for times in self.times]
        one, other = (times.heed(self.step, reports) for times in self.times)
        assert one == other
        return one


def test_rank_0s_clock_says_when_minutes_have_passed():
    ranks = Ranks(every_minutes=0.5)
    said = [ranks.after_step(rank_0_s=11.0, rank_1_s=90.0) for _ in range(9)]
    assert said == [NOTHING, NOTHING, SAVES] * 3


def test_minutes_begin_anew_with_every_save_whatever_its_reason():
    ranks = Ranks(every_minutes=1.0, every_steps=4)
    said = [ranks.after_step(rank_0_s=25.0) for _ in range(9)]
    by_steps, by_minutes = {4, 8}, {3, 7}
    assert {n for n, after in enumerate(said, 1) if after == SAVES} == by_steps | by_minutes


@pytest.mark.parametrize(("settings", "saves"), [({}, SAVES), ({"every_steps": 0}, NOTHING)])
def test_the_last_step_is_saved_but_where_nothing_ever_is(settings, saves):
    ranks = Ranks(num_steps=2, **settings)
    assert [ranks.after_step(), ranks.after_step()] == [NOTHING, saves]


@pytest.mark.parametrize("rank", [0, 1])
def test_whichever_rank_is_asked_to_end_all_save_and_end(rank):
    ranks = Ranks()
    assert ranks.after_step() == NOTHING
    ranks.asked[rank] = True
    assert ranks.after_step() == STOPS


def test_a_run_that_has_come_to_its_end_is_not_stopped():
    ranks = Ranks(num_steps=1)
    ranks.asked[0] = True
    assert ranks.after_step() == SAVES


@pytest.mark.parametrize("settings", [{"every_steps": 0}, {"on_sigterm": False}])
def test_a_run_that_does_not_save_when_asked_does_not_heed_it(settings):
    ranks = Ranks(**settings)
    ranks.asked[0] = True
    assert ranks.after_step() == NOTHING


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
