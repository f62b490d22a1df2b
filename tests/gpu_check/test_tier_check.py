"""A tier is found out about step by step; with a driver, by a library that stands for libcuda."""

from contextlib import closing
from dataclasses import replace

import pytest
from wrong_tiers import PLACEMENT, WrongTier, over_unsignalled, rightly, signalled_early

from jaxmorph.copies import trial, ways
from jaxmorph.copies.copy_engine import CopyEngineTier
from jaxmorph.copies.cuda_driver import CudaDriver, CudaError
from jaxmorph.copies.dlpack_memory import view_on_device
from jaxmorph.copies.pinned_host import PinnedHostTier
from jaxmorph.copies.registered_memory import RegisteredMemory
from jaxmorph.copies.ways import AbsentTier, ways_to_copy
from jaxmorph.gpu_check.copy_child import tell_of_tier
from jaxmorph.gpu_check.copy_settings import COPIES_ON_CPU
from jaxmorph.gpu_check.lone_end import Site
from jaxmorph.gpu_check.tier_check import IncomingTier, OutgoingTier, check_tier
from jaxmorph.gpu_check.tier_found import found_from

SITE = Site(PLACEMENT, None, patience_s=20.0)
MATMULS = replace(COPIES_ON_CPU.matmuls, ops=2, rounds=1)
SETTINGS = replace(COPIES_ON_CPU, num_small=8, matmuls=MATMULS)
FIELDS = ["wholeness", "latency", "speeds", "disturbance"]


@pytest.fixture
def opened(monkeypatch):
    """Opens the ways of copying of a GPU, though arrays are on a CPU."""
    for module in (ways, trial):
        monkeypatch.setattr(module, "is_on_host", lambda placement: False)
    monkeypatch.setattr(trial, "_WIDTH", 8)  # a CPU is busy with less

    def opened(library):
        return closing(
            ways_to_copy(
                PLACEMENT, lambda keeper: None, open_driver=lambda n: CudaDriver(library, n)
            )
        )

    return opened


def test_a_tier_that_works_is_found_out_about_step_by_step():
    told = list(check_tier(OutgoingTier(WrongTier(rightly), SITE), SETTINGS))
    assert [which for which, _ in told] == FIELDS
    assert found_from("wrong", told).is_right


def test_slots_are_registered_for_the_copy_engine_and_not_left_so(cuda_library):
    library = cuda_library()

    def view(value, stream):
        return view_on_device(value, None)  # a CPU's arrays can't wait on a stream

    with closing(PinnedHostTier()) as pinned, closing(CudaDriver(library, 0)) as driver:
        memory = RegisteredMemory(driver)
        engine = CopyEngineTier(driver, memory, pinned, view)
        told = list(check_tier(OutgoingTier(engine, replace(SITE, memory=memory)), SETTINGS))
    assert [which for which, _ in told] == FIELDS
    assert found_from("copy_engine", told).is_right
    assert library.registered == {}
    calls = library.names()
    assert calls.count("cuMemHostRegister_v2") == calls.count("cuMemHostUnregister") > 3
    assert calls.count("cuMemcpyDtoHAsync_v2") > SETTINGS.num_small


def test_slots_that_cannot_be_registered_are_an_error_and_no_other_way_is_measured(
    opened, cuda_library
):
    library = cuda_library()
    with opened(library) as found:
        (engine, *_), site = found.outgoing, replace(SITE, memory=found.memory)
        steps = check_tier(OutgoingTier(engine, site), SETTINGS)
        library.failing["cuMemHostRegister_v2"] = 304
        with pytest.raises(CudaError, match="CUDA_ERROR_OPERATING_SYSTEM"):
            list(steps)


def test_a_tier_that_fails_its_trial_is_trouble_and_one_that_cannot_be_had_is_absent(
    opened, cuda_library
):
    with opened(cuda_library()) as found:
        landing = next(tier for tier in found.incoming if tier.name == "copy_engine")
        site = replace(SITE, memory=found.memory)
        ((which, reason),) = check_tier(IncomingTier(landing, site), SETTINGS)
    assert which == "trouble"
    assert "Error" in reason
    absent = AbsentTier("copy_engine", CudaError("loading libcuda.so.1", None, "no such file"))
    ((which, reason),) = check_tier(OutgoingTier(absent, SITE), SETTINGS)
    assert which == "absent"
    assert "no such file" in reason


def test_kernels_are_absent_where_they_are_not_for_the_device(opened, cuda_library):
    with opened(cuda_library()) as found:
        site = replace(SITE, memory=found.memory)
        for tiers, direction in ((found.outgoing, OutgoingTier), (found.incoming, IncomingTier)):
            kernels = next(tier for tier in tiers if tier.name == "pallas")
            ((which, reason),) = check_tier(direction(kernels, site), SETTINGS)
            assert which == "absent"
            assert "expected a CUDA GPU" in reason


def told_of(tier, check=check_tier):
    told = []
    looked_at = OutgoingTier(tier, SITE)
    is_sound = tell_of_tier("wrong", looked_at, SETTINGS, check, lambda **line: told.append(line))
    return is_sound, told


def test_what_was_found_out_before_an_error_is_told_with_it():
    def check(tier, settings):
        yield "latency", {"call_us": 1.0, "over_us": 2.0}
        raise RuntimeError("illegal\naddress")

    is_sound, told = told_of(WrongTier(rightly), check)
    assert not is_sound
    assert told == [
        {"tier": "wrong"},
        {"tier": "wrong", "latency": {"call_us": 1.0, "over_us": 2.0}},
        {"tier": "wrong", "trouble": "RuntimeError: illegal address"},
    ]


@pytest.mark.parametrize("copy", [signalled_early, over_unsignalled])
def test_a_tier_that_fails_its_trial_is_looked_at_no_further(copy):
    is_sound, told = told_of(WrongTier(copy))
    assert not is_sound
    assert [[*each] for each in told] == [["tier"], ["tier", "trouble"]]
