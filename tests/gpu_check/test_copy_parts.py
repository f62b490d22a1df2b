"""What becomes of what processes tell of ways of copying, and which way is best."""

from dataclasses import asdict, replace

import pytest

from jaxmorph.gpu_check.child_process import Told
from jaxmorph.gpu_check.copy_parts import look_at_tiers, report_on
from jaxmorph.gpu_check.copy_settings import COPIES_ON_CPU, COPIES_ON_GPU
from jaxmorph.gpu_check.copy_times import Latency, Speed
from jaxmorph.gpu_check.disturbance import Disturbance
from jaxmorph.gpu_check.tier_check import INCOMING, OUTGOING
from jaxmorph.gpu_check.tier_found import TierFound, found_from
from jaxmorph.gpu_check.whole_payloads import Wholeness

MIB = 1 << 20
WHOLE = Wholeness(12, num_early=12, num_small=1000)
TORN = replace(WHOLE, num_torn=1, first_torn="message 3, 4 B: 1 of all bytes")


def found(name, gb_per_s=52.0, training=0.0, wholeness=WHOLE, **others):
    return TierFound(
        name,
        wholeness=wholeness,
        latency=Latency(20.0, 30.0),
        speeds=[Speed(size * MIB, 1.0, gb_per_s, 55.0) for size in (1, 16, 64)],
        disturbance=Disturbance(1.7, training, 10, 0.1, 40.0),
        **others,
    )


class Asked:
    """Stands for the processes: each answer goes to one of them."""

    def __init__(self, *answers):
        self.answers, self.groups, self.limits_s = list(answers), [], []

    def __call__(self, names, limit_s):
        self.groups.append(list(names))
        self.limits_s.append(limit_s)
        return self.answers.pop(0)


def test_what_is_told_of_a_tier_is_what_was_found():
    tier = found("engine")
    told = [(which, value) for which, value in asdict(tier).items() if which != "name"]
    assert found_from("engine", told) == tier


def test_on_a_gpu_kernels_and_the_engine_have_processes_and_one_that_dies_hides_no_other():
    asked = Asked(
        Told([{"tier": "copy_engine"}, {"tier": "copy_engine", "wholeness": asdict(WHOLE)}]),
        Told([]),
        Told([{"tier": "c"}, {"tier": "d"}], "it ended with -6"),
        Told([{"tier": "e"}, {"tier": "e", "absent": "no driver"}]),
    )
    names = ("copy_engine", "pallas", "c", "d", "e")
    engine, kernels, c, d, e = look_at_tiers(names, asked, COPIES_ON_GPU)
    assert asked.groups == [["copy_engine"], ["pallas"], ["c", "d", "e"], ["e"]]
    assert asked.limits_s[:3] == [75.0, 75.0, pytest.approx(200.0, abs=1.0)]
    assert engine == TierFound("copy_engine", wholeness=WHOLE)
    assert kernels == TierFound("pallas", trouble="its process told nothing")
    assert (c.trouble, d.trouble) == ("", "it ended with -6")
    assert e == TierFound("e", absent="no driver")


def test_on_a_cpu_those_behind_a_tier_that_hangs_get_another_process():
    asked = Asked(
        Told([{"tier": "a"}, {"tier": "b"}], "it hung for 60 s: File x"),
        Told([{"tier": "c"}, {"tier": "c", "wholeness": asdict(WHOLE)}]),
    )
    a, b, c = look_at_tiers("abc", asked, COPIES_ON_CPU)
    assert asked.groups == [["a", "b", "c"], ["c"]]
    assert (a.trouble, b.trouble, c.trouble) == ("", "it hung for 60 s: File x", "")
    assert c.is_right
    assert not b.is_right


def test_a_process_that_dies_before_it_tells_anything_ends_not_for_ever():
    died = Told([], "its process ended with 1: no GPU")
    found = look_at_tiers("ab", Asked(died, died), COPIES_ON_CPU)
    assert [tier.trouble for tier in found] == [died.trouble, died.trouble]


def test_a_tier_has_no_more_time_than_is_left_and_none_is_begun_without_any():
    times = iter([0.0, 0.0, 150.0, 190.0])
    asked = Asked(Told([]), Told([]))
    settings = replace(COPIES_ON_GPU, part_s=200.0, child_s=75.0)
    names = ("copy_engine", "pallas", "c")
    *_, late = look_at_tiers(names, asked, settings, clock=lambda: next(times))
    assert asked.limits_s == [75.0, 50.0]
    assert late.trouble == "not looked at: the others took all of 200 s"


def verdicts(report):
    return {row.name: row.holds for row in report.rows() if row.holds is not None}


def test_runs_take_the_first_that_is_right_and_only_of_it_is_speed_asked():
    torn, slow = found("kernel", wholeness=TORN), found("engine", gb_per_s=40.0, training=0.03)
    report = report_on(OUTGOING, "gpu", [torn, slow, found("callback")])
    assert (report.taken, report.recommended) == ("engine", "callback")
    assert verdicts(report) == {
        "kernel: whole": True,
        "kernel: torn": False,
        "engine: whole": True,
        "engine: torn": True,
        "engine: 16.0 MiB": False,
        "engine: 64.0 MiB": False,
        "engine: slowdown": False,
        "callback: whole": True,
        "callback: torn": True,
        "runs copy into slots by": True,
    }
    *_, last = report.rows()
    assert (last.value, last.note) == ("callback", "it should come before engine")


def test_on_a_cpu_nothing_is_asked_of_how_fast_copies_are():
    report = report_on(INCOMING, "cpu", [found("host", gb_per_s=1.0, training=0.5)])
    assert set(verdicts(report)) == {"host: whole", "host: torn", "runs copy out of slots by"}
    assert report.recommended is None


def test_the_fastest_of_those_that_hardly_disturb_is_recommended():
    tiers = [found("a", 50.0), found("b", 53.0, training=0.021), found("c", 52.0, training=0.019)]
    assert report_on(OUTGOING, "gpu", tiers).recommended == "c"
    report = report_on(OUTGOING, "gpu", tiers[:2])
    assert report.recommended == report.taken == "a"
    assert [*report.rows()][-1].note == "the one that runs take"


def test_without_any_that_is_right_the_part_does_not_hold():
    absent = TierFound("engine", absent="no driver")
    hangs = found("host", trouble="it hung for 75 s")
    report = report_on(INCOMING, "gpu", [absent, hangs])
    assert report.taken is None
    assert verdicts(report)["host"] is False
    assert verdicts(report)["runs copy out of slots by"] is False
    assert "engine" not in verdicts(report)


@pytest.mark.parametrize(("bare", "holds"), [(57.0, True), (58.0, False), (None, False)])
def test_large_messages_must_nearly_be_as_fast_as_bare_copies(bare, holds):
    speeds = [Speed(16 * MIB, 0.32, 52.0, bare)]
    report = report_on(OUTGOING, "gpu", [replace(found("engine"), speeds=speeds)])
    assert verdicts(report)["engine: 16.0 MiB"] is holds
