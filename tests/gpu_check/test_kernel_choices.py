"""What XLA chooses by timing is kept for the check's other processes, and only for as long."""

import os
from pathlib import Path
from types import SimpleNamespace

import jax

from jaxmorph.gpu_check.kernel_choices import sharing_kernel_choices

GPU, CPU = SimpleNamespace(platform="gpu"), SimpleNamespace(platform="cpu")
FOLDER, LEAST_S = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"


def settings():
    return [(jax.config.values[name], os.environ.get(name.upper())) for name in (FOLDER, LEAST_S)]


def test_a_gpus_choices_are_shared_with_what_is_started_and_gone_afterwards(monkeypatch):
    monkeypatch.setenv(LEAST_S.upper(), "2")  # what the user has said
    before = settings()
    with sharing_kernel_choices(GPU):
        folder = Path(jax.config.values[FOLDER])
        assert folder.is_dir()
        assert os.environ[FOLDER.upper()] == str(folder)
        assert jax.config.values[LEAST_S] == float(os.environ[LEAST_S.upper()]) > 1e6
    assert not folder.exists()
    assert settings() == before


def test_a_cpu_and_a_users_own_cache_are_left_as_they_are(tmp_path):
    before = settings()
    with sharing_kernel_choices(CPU):
        assert settings() == before
    jax.config.update(FOLDER, str(tmp_path))
    try:
        with sharing_kernel_choices(GPU):
            assert jax.config.values[FOLDER] == str(tmp_path)
            assert FOLDER.upper() not in os.environ
    finally:
        jax.config.update(FOLDER, before[0][0])
    assert settings() == before
