import pytest

from jaxmorph.compare.other_work import ProcessorTimes, busy_ticks, others_share, processor_times

# user nice system idle iowait irq softirq steal guest guest_nice
STAT = """\
cpu  1000 0 0 9999 0 0 0 0 0 0
cpu0 100 20 30 5000 400 1 2 3 50 0
cpu1 10 0 0 5000 0 0 0 0 0 0
cpu10 7 0 0 5000 0 0 0 0 0 0
intr 12 0 3
ctxt 4
"""


def test_a_processor_is_busy_unless_it_idles_or_waits_for_a_disk():
    assert busy_ticks(STAT, {0}) == 100 + 20 + 30 + 1 + 2 + 3
    assert busy_ticks(STAT, {1, 10}) == 10 + 7


@pytest.mark.parametrize(
    ("busy_s", "own_s", "share"),
    [(12.0, 4.0, 0.4), (4.0, 4.0, 0.0), (3.9, 4.0, 0.0)],  # ticks may be fewer than were used
)
def test_what_this_program_did_not_use_others_did(busy_s, own_s, share):
    before = ProcessorTimes(at_s=100.0, busy_s=50.0, own_s=7.0)
    after = ProcessorTimes(at_s=110.0, busy_s=50.0 + busy_s, own_s=7.0 + own_s)
    assert others_share(before, after, 2) == pytest.approx(share)


def test_what_is_not_counted_is_not_known():
    unknown, known = ProcessorTimes(0.0, None, 1.0), ProcessorTimes(9.0, 9.0, 9.0)
    assert others_share(unknown, known, 2) is None
    assert others_share(known, unknown, 2) is None
    assert others_share(known, known, 2) is None  # no time has passed


def test_times_only_grow():
    before = processor_times()
    sum(range(1_000_000))
    after = processor_times()
    assert after.at_s >= before.at_s
    assert after.own_s >= before.own_s
    assert (after.busy_s or 0.0) >= (before.busy_s or 0.0)
