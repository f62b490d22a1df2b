"""What ranks set before JAX starts, and that the installed JAX knows it."""

from types import SimpleNamespace

import jax
import pytest

from jaxmorph.records import Link
from jaxmorph.runtime import xla_settings
from jaxmorph.runtime.xla_settings import (
    gpu_settings,
    have_cpu_devices,
    set_up_gpus,
    settings_in_force,
    unknown_flags,
)
from jaxmorph.training.run import device_in_words

NO_SUCH = "--xla_gpu_no_such_flag=1"
FLAGS = [
    each.as_flag
    for fails_over in (False, True)
    for each in gpu_settings(fails_over=fails_over)
    if each.is_flag
]


def test_the_installed_jax_knows_all_flags():
    assert unknown_flags(FLAGS) == frozenset()


def test_unknown_flags_are_found():
    assert unknown_flags([*FLAGS, NO_SUCH]) == {NO_SUCH}


@pytest.fixture
def environment():
    return {"XLA_FLAGS": "--xla_gpu_shard_autotuning=true", "NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize("fails_over", [True, False])
def test_an_error_of_nccl_fails_its_link_or_ends_its_rank(environment, fails_over):
    set_up_gpus(fails_over=fails_over, environment=environment)
    flags = environment["XLA_FLAGS"].split()
    assert f"--xla_gpu_nccl_terminate_on_error={str(not fails_over).lower()}" in flags
    aborts = "--xla_gpu_nccl_blocking_communicators=false" in flags
    assert aborts == fails_over
    assert ("XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE" in environment) == fails_over


def test_the_users_own_settings_win(environment, monkeypatch):
    set_up_gpus(fails_over=True, environment=environment)
    assert environment["NCCL_DEBUG"] == "INFO"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    in_force = list(settings_in_force(fails_over=True))
    assert in_force[:2] == ["xla_gpu_shard_autotuning=true", "NCCL_DEBUG=INFO"]


def test_a_new_jax_is_asked_which_flags_it_knows(environment, monkeypatch):
    asked = []
    monkeypatch.setattr(jax, "__version__", "0.99.1")
    monkeypatch.setattr(
        xla_settings, "unknown_flags", lambda flags: asked.extend(flags) or frozenset(flags[:1])
    )
    set_up_gpus(fails_over=True, environment=environment)
    flags = environment["XLA_FLAGS"].split()
    assert [*asked[1:], "--xla_gpu_shard_autotuning=true"] == flags
    monkeypatch.setattr(jax, "__version__", "0.12.0.1")
    set_up_gpus(fails_over=True, environment={})  # known by heart
    assert len(asked) == len(flags)


def words_of(platform, fails_over):
    device = SimpleNamespace(platform=platform, device_kind="NVIDIA H200")
    link = frozenset((Link(0, 1),))
    settings = SimpleNamespace(
        num_ranks=2, fails_over=fails_over, direct=link, delegated=frozenset(),
        failing_over=link if fails_over else frozenset(),
    )  # fmt: skip
    return list(device_in_words(device, settings))  # pyright: ignore[reportArgumentType]


def test_a_run_on_gpus_says_what_is_unverified():
    computes_on = "rank 0 computes on NVIDIA H200"
    assert words_of("cpu", fails_over=True) == [computes_on]
    *first, unverified = words_of("gpu", fails_over=True)
    assert first[0] == computes_on
    assert unverified == "not verified on GPUs yet: direct links, failover"
    assert words_of("gpu", fails_over=False)[-1] == "not verified on GPUs yet: direct links"


@pytest.mark.parametrize(
    ("threads", "flags", "devices"),
    [("2", "", 2), ("1", "", None), ("2", "--xla_force_host_platform_device_count=4", None)],
)
def test_a_spare_device_needs_a_second_thread(monkeypatch, threads, flags, devices):
    updated = {}
    monkeypatch.setenv("NPROC", threads)
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(jax.config, "update", updated.__setitem__)
    have_cpu_devices(1, spare=True)
    assert updated.get("jax_num_cpu_devices") == devices
