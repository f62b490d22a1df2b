"""What devices tell of their memory comes to rank 0 with each step, if they all tell."""

from types import SimpleNamespace

import jax

from jaxmorph.runtime.device_memory import free_bytes, peaks_of, told_peak


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
