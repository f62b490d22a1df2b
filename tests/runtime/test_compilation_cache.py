"""Whether a rank keeps what it compiles, and where."""

import jax
import pytest

from jaxmorph.config import check_config
from jaxmorph.runtime import compilation_cache
from jaxmorph.runtime.compilation_cache import keep_compiled
from jaxmorph.runtime.kept_programs import KeptPrograms

SAVES = {"checkpoint": {"every_steps": 5}}
DIR, LEAST_S = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture
def told(monkeypatch):
    """Where programs are kept by what the rank has set, for this test alone."""
    before, told = {name: jax.config.values[name] for name in (DIR, LEAST_S)}, []
    monkeypatch.setattr(compilation_cache, "compile_by", lambda how: told.append(how.__self__))
    jax.config.update(DIR, None)
    yield told
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize(("wanted", "name"), [(True, "run/compilation_cache"), ("kept", "kept")])
def test_a_run_that_may_restart_keeps_what_its_ranks_compile(
    told, tmp_path, monkeypatch, wanted, name
):
    monkeypatch.chdir(tmp_path)
    config = check_config(SAVES | {"restart_policy": {"compilation_cache": wanted}})
    keep_compiled(config, tmp_path / "run", 2)
    (programs,) = told
    assert isinstance(programs, KeptPrograms)
    assert programs.folder == tmp_path / name / "rank_2"
    assert jax.config.values[DIR] == str(tmp_path / name)
    assert jax.config.values[LEAST_S] == 0.0


def test_a_cache_that_is_set_already_stays(told, tmp_path):
    jax.config.update(DIR, "/elsewhere")
    keep_compiled(check_config(SAVES), tmp_path, 0)
    assert jax.config.values[DIR] == "/elsewhere"
    assert len(told) == 1


@pytest.mark.parametrize(
    "sections",
    [{}, SAVES | {"restart_policy": {"compilation_cache": False}},
     SAVES | {"restart_policy": {"max_restarts": 0}}],
)  # fmt: skip
def test_a_run_that_will_not_restart_keeps_nothing(told, tmp_path, sections):
    keep_compiled(check_config(sections), tmp_path, 0)
    assert told == []
    assert jax.config.values[DIR] is None
