import threading
import time
from contextlib import contextmanager
from itertools import pairwise

import jax.numpy as jnp
import pytest

from jaxmorph.progress import StalledError
from jaxmorph.runtime.queue import AsynchronousQueue, Pace, PacedQueue
from jaxmorph.runtime.routes import Moved
from jaxmorph.schedule.ops import Op, OpKind


@pytest.fixture(params=[AsynchronousQueue, PacedQueue])
def queue(request):
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def paced():
    made = PacedQueue()
    yield made
    made.close()


@contextmanager
def all_enqueued_first(queue):
    """Run nothing until everything is enqueued, however slow the machine is."""
    begin = threading.Event()
    queue.enqueue(None, lambda: begin.wait(30))
    yield
    begin.set()


def test_a_caller_waits_for_the_items_before(queue):
    ran = []

    class Slow:
        def block_until_ready(self):
            time.sleep(0.02)
            ran.append("it is over")

    queue.enqueue("an op", Slow)
    queue.await_items()
    assert ran == ["it is over"]
    assert [stamp.label for stamp in queue.drain()] == ["an op"]


def test_items_run_in_order_and_are_stamped(queue):
    ran = []
    for name in ("a", "b", "c"):
        queue.enqueue(name, lambda name=name: ran.append(name))
    queue.enqueue(None, lambda: ran.append("unlabelled"))
    stamps = queue.drain()
    assert ran == ["a", "b", "c", "unlabelled"]
    assert [stamp.label for stamp in stamps] == ["a", "b", "c"]
    assert all(before.end_s <= after.start_s for before, after in pairwise(stamps))


def test_a_drained_queue_begins_with_no_stamps(queue):
    queue.enqueue("a", lambda: jnp.zeros(3))
    assert len(queue.drain()) == 1
    assert queue.drain() == []


def test_an_error_is_raised_and_drops_later_items(queue):
    ran = []

    def enqueue_and_drain():
        queue.enqueue("bad", lambda: 1 // 0)
        queue.enqueue("behind", lambda: ran.append("behind"))
        queue.drain()

    with pytest.raises(ZeroDivisionError):
        enqueue_and_drain()
    assert ran == []


class Failing:
    """An array whose computation goes wrong."""

    def block_until_ready(self):
        raise ZeroDivisionError


def test_a_failed_queue_takes_no_items_until_restarted(queue):
    queue.enqueue("bad", Failing)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            queue.drain()
    with pytest.raises(ZeroDivisionError):
        queue.enqueue("later", lambda: None)
    queue.restart()
    queue.enqueue("again", lambda: None)
    assert [stamp.label for stamp in queue.drain()] == ["again"]


def test_a_failed_item_is_the_cause_of_later_errors(queue):
    later = ValueError("INTERNAL: an input of this op has failed")
    assert queue.cause_of(later) is later
    queue.enqueue("bad", Failing)
    assert isinstance(queue.cause_of(later), ZeroDivisionError)
    queue.restart()
    assert queue.cause_of(later) is later


@pytest.mark.parametrize("fails", [True, False])
def test_items_from_before_a_restart_are_ignored(paced, fails):
    begun, go_on = threading.Event(), threading.Event()

    def end_late():
        begun.set()
        go_on.wait(30)
        if fails:
            raise ZeroDivisionError

    paced.enqueue("late", end_late)
    paced.enqueue("behind", lambda: None)
    assert begun.wait(30)
    paced.restart()
    go_on.set()
    paced.enqueue("again", lambda: None)
    assert [stamp.label for stamp in paced.drain()] == ["again"]


def test_paced_ops_last_their_duration_against_carried_deadlines(paced):
    with all_enqueued_first(paced):
        for _ in range(20):
            paced.enqueue("op", lambda: None, duration_s=0.005)
    stamps = paced.drain()
    assert all(stamp.duration_s >= 0.005 - 1e-9 for stamp in stamps)
    assert sorted(stamp.duration_s for stamp in stamps)[10] == pytest.approx(0.005, abs=1e-9)
    ends = [stamp.end_s for stamp in stamps]
    starts = [stamp.start_s for stamp in stamps]
    assert starts[1:] == ends[:-1]  # late wake-ups don't add up


def test_a_paced_op_that_computes_longer_is_charged(paced):
    paced.enqueue("op", lambda: time.sleep(0.03), duration_s=0.01)
    (stamp,) = paced.drain()
    assert stamp.duration_s >= 0.03


def test_waiting_for_bytes_is_not_op_time(paced):
    with all_enqueued_first(paced):
        paced.enqueue_transfer("slow bytes", lambda arrived_s: moved(arrived_s, takes_s=0.1))
        paced.enqueue("op", lambda: None, duration_s=0.01)
        paced.enqueue("next", lambda: None, duration_s=0.01)
    transfer, op, later = paced.drain()
    assert transfer.duration_s == 0.0
    assert op.end_s >= transfer.end_s + 0.1  # the queue waited for the bytes
    assert 0.01 <= op.duration_s + 1e-9 < 0.1
    assert later.start_s == op.end_s


def test_an_ops_compute_after_a_transfer_is_op_time(paced):
    with all_enqueued_first(paced):
        paced.enqueue_transfer("quick", lambda arrived_s: moved(arrived_s))
        paced.enqueue("op", lambda: time.sleep(0.05), duration_s=0.01)
    _, op = paced.drain()
    assert op.duration_s >= 0.05


def test_a_transfer_lasts_until_both_ends_came(paced):
    """Head-of-line blocking: an op that is ready waits for the peer of the transfer before it."""
    peer_arrived_s = time.monotonic() + 60.0
    with all_enqueued_first(paced):
        paced.enqueue_transfer("late peer", lambda arrived_s: moved(peer_arrived_s))
        paced.enqueue("op", lambda: None)
        paced.enqueue_transfer("early peer", lambda arrived_s: moved(arrived_s - 1.0))
    late, op, early = paced.drain()
    assert late.end_s == peer_arrived_s == op.start_s
    assert early.start_s == early.end_s == op.end_s


def test_an_emulated_link_holds_the_queue(queue):
    overs_s = []

    def pass_slowly(arrived_s):
        overs_s.append(arrived_s + 0.05)
        return Moved(jnp.zeros(1), arrived_s, overs_s[-1])

    for _ in range(2):
        queue.enqueue_transfer("slow", pass_slowly)
        queue.enqueue("op", lambda: None)
    stamps = queue.drain()
    now_s = time.monotonic()
    slow = [stamp for stamp in stamps if stamp.label == "slow"]
    ops = [stamp for stamp in stamps if stamp.label == "op"]
    assert all(stamp.end_s >= over_s for stamp, over_s in zip(slow, overs_s, strict=True))
    assert all(op.start_s >= over_s for op, over_s in zip(ops, overs_s, strict=True))
    assert overs_s[1] - overs_s[0] >= 0.05 - 1e-9  # the second came after the first was over
    assert now_s >= overs_s[1]


def test_moving_bytes_overlaps_the_next_op(paced):
    with all_enqueued_first(paced):
        paced.enqueue("before", lambda: time.sleep(0.001))
        for _ in range(5):
            paced.enqueue_transfer("transfer", lambda arrived_s: moved(arrived_s, takes_s=0.02))
            paced.enqueue("op", lambda: None, duration_s=0.1)
    stamps = paced.drain()
    now_s = time.monotonic()
    transfers = [stamp.duration_s for stamp in stamps if stamp.label == "transfer"]
    ops = sorted(stamp.duration_s for stamp in stamps if stamp.label == "op")
    assert transfers == [0.0] * 5
    assert ops[2] == pytest.approx(0.1, abs=1e-9)  # not the 0.12 s that both take
    assert now_s >= stamps[-1].end_s


def moved(peer_arrived_s, takes_s=0.0):
    time.sleep(takes_s)
    return Moved(jnp.zeros(1), peer_arrived_s)


def test_enqueue_after_passes_the_previous_end(queue):
    called = []
    queue.enqueue("op", lambda: time.sleep(0.01) or jnp.zeros(3), 0.02)
    queue.enqueue_after(called.append)
    (stamp,) = queue.drain()
    assert called == [stamp.end_s]


def test_an_op_starts_after_its_wait(queue):
    over, ends_s = threading.Event(), []

    def wait() -> float:
        assert over.wait(30)
        ends_s.append(time.monotonic())
        return ends_s[0]

    threading.Timer(0.02, over.set).start()
    queue.enqueue_wait(wait)
    queue.enqueue("op", lambda: jnp.zeros(3), 0.001)
    (stamp,) = queue.drain()
    assert stamp.start_s >= ends_s[0]


def test_late_wake_ups_are_not_charged(paced):
    with all_enqueued_first(paced):
        paced.enqueue("before", lambda: None, 0.01)
        paced.enqueue_wait(lambda: time.sleep(0.05) or 0.0)  # it was over long before
        paced.enqueue("after", lambda: None, 0.2)
    before, after = paced.drain()
    assert after.start_s == before.end_s


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_chunk_takes_its_share_of_the_time(num_chunks):
    pace = Pace.of_stage(8.0, 6.0, 4.0, num_chunks)
    stage_ms = {OpKind.F: 8.0, OpKind.B: 6.0, OpKind.W: 4.0, OpKind.BW: 10.0}
    for kind, time_ms in stage_ms.items():
        assert pace.of(Op(kind, 0)) == pytest.approx(time_ms / num_chunks / 1e3)
    assert pace.of(Op(OpKind.W, 4, group=3)) == pytest.approx(3 * 4.0 / num_chunks / 1e3)
    assert Pace().of(Op(OpKind.F, 0)) is None  # as long as it takes


class NeverReady:
    """The result of an item that the accelerator doesn't end before it may."""

    def __init__(self):
        self.may_end = threading.Event()

    def block_until_ready(self):
        assert self.may_end.wait(30)


def test_an_item_that_never_ends_is_named(queue):
    never = NeverReady()
    queue.enqueue("F2", lambda: jnp.zeros(3))
    queue.enqueue("F3", lambda: never)
    with pytest.raises(StalledError, match=r"no progress for .* its queue is at F3"):
        queue.drain(0.1)
    never.may_end.set()


@pytest.mark.parametrize(
    ("label", "timeout_s", "stalls"),
    [(Op(OpKind.F, 3), 0.0, True), (Op(OpKind.F, 3), 600.0, False), ("a transfer", 0.0, False)],
)
def test_an_op_that_holds_the_queue_explains_waits_in_vain(queue, label, timeout_s, stalls):
    never, in_vain = NeverReady(), TimeoutError("no gradient came")
    assert queue.stall(in_vain, 0.0) is None
    queue.enqueue(label, lambda: never)
    until_s = time.monotonic() + 30
    while queue._at is None:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    stall = queue.stall(in_vain, timeout_s)
    assert (stall is not None) == stalls
    if stall is not None:
        assert str(stall).endswith("its queue is at F3; so it waited in vain: no gradient came")
    never.may_end.set()
    queue.drain()
    assert queue.stall(in_vain, 0.0) is None
