"""Waits for what never comes end, and how a kernel's does is told by its process."""

from dataclasses import asdict

import pytest

from jaxmorph.gpu_check.child_process import Told
from jaxmorph.gpu_check.kernel_wait import KernelWait
from jaxmorph.gpu_check.waits import wait_on_host, with_kernel

WAITED = KernelWait(spin_us=2000, waited_us=2100.0, said_so=True, then_whole=True)


def verdicts(told):
    report = with_kernel(51.0, lambda: told)
    return [row.holds for row in report.rows()]


def test_the_host_waits_until_its_deadline():
    waited_ms = wait_on_host()
    assert waited_ms is not None
    assert waited_ms >= 50


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, [True, True, True]),
        ({"waited_us": 1999.0}, [True, False, True]),
        ({"waited_us": 1e7}, [True, False, True]),
        ({"said_so": False}, [True, False, True]),
        ({"then_whole": False}, [True, True, False]),
    ],
)
def test_a_kernel_must_give_up_in_time_and_say_so(change, holds):
    assert verdicts(Told([asdict(WAITED) | change])) == holds


def test_a_kernel_whose_process_dies_does_not_work():
    assert verdicts(Told([], "its process ended with -6: illegal address")) == [True, False]
    assert verdicts(Told([])) == [True, False]
