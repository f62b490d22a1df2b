"""What ranks report of a step, put together: times of probes, and what devices hold."""

import json
from types import SimpleNamespace

import jax

from jaxmorph.records import Link
from jaxmorph.runtime.direct_probe import probe_transfers
from jaxmorph.runtime.rendezvous import DETAIL
from jaxmorph.runtime.report import free_bytes, peaks_of, probe_times, told_peak

LINK = Link(1, 2)


def reports(*ends):
    return [{DETAIL: json.dumps({"probes": end} if end else {})} for end in ends]


def pairs(up_ms, down_ms):
    """One end's times of three messages each way."""
    labels = [map(str, probe_transfers(LINK, number)) for number in (1, 2, 3)]
    times = zip(up_ms, down_ms, strict=True)
    return [
        told
        for (up, down), (up_took_ms, down_took_ms) in zip(labels, times, strict=True)
        for told in ((up, up_took_ms), (down, down_took_ms))
    ]


def test_a_probe_counts_the_later_end_and_the_median():
    one = pairs((0.5, 45.0, 0.7), (20.0, 21.0, 1.0))
    other = pairs((30.0, 44.0, 0.9), (22.0, 20.5, 19.5))
    took_ms = probe_times(reports(None, one, other, None))
    assert sorted(took_ms.values()) == [0.7, 20.0]
    first_up, first_down = map(str, probe_transfers(LINK, 1))
    assert took_ms == {first_up: 0.7, first_down: 20.0}


def test_without_a_probe_there_are_no_times():
    assert probe_times(reports(None, None)) == {}


def device(**told):
    return SimpleNamespace(memory_stats=lambda: told or None)


def test_what_is_free_is_what_jax_may_take_and_has_not():
    assert free_bytes(device(bytes_limit=100, bytes_in_use=30)) == 70
    assert free_bytes(device(bytes_limit=100)) == 100
    assert free_bytes(device(bytes_in_use=30)) is None
    assert free_bytes(device()) is None


def test_all_stages_peaks_or_none():
    tells, silent = device(peak_bytes_in_use=40), device(bytes_in_use=30)
    assert peaks_of([told_peak(tells), told_peak(tells)]) == (40, 40)
    for others in (silent, device()):
        assert peaks_of([told_peak(tells), told_peak(others)]) is None


def test_a_cpu_tells_nothing():
    (cpu, *_) = jax.devices("cpu")
    assert told_peak(cpu) == {}
    assert free_bytes(cpu) is None
