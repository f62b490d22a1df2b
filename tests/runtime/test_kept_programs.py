"""Kept programs equal compiled ones, and broken files are never run."""

import errno
import fcntl
import logging
import os
import random
import time
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

from jaxmorph.config import check_config
from jaxmorph.models.gpt2 import build
from jaxmorph.runtime import kept_programs
from jaxmorph.runtime.kept_programs import CompilationCounter, KeptPrograms, keep_compiled
from jaxmorph.stage.build import OP_KINDS, build_stage
from jaxmorph.stage.compiling import compile_by
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import MicrobatchShapes
from jaxmorph.stage.parameters import init_stage_params

X = jnp.linspace(0.0, 1.0, 1024).reshape(32, 32)


def lowered(scale):
    """A program with two results and a donated argument."""

    def step(weights, x):
        moved = jnp.tanh(x @ weights) * scale
        return {"moved": moved, "sum": moved.sum()}

    return jax.jit(step, donate_argnums=(1,)).lower(X, X)


def results(program):
    return jax.tree.map(lambda leaf: leaf.tobytes(), jax.device_get(program(X, jnp.array(X))))


@pytest.fixture
def counter():
    return CompilationCounter()


def test_another_process_loads_the_kept_program(tmp_path, counter):
    first = KeptPrograms(tmp_path / "rank_1").compile(lowered(2.0))
    expected, was = results(first), counter.count
    assert was > 0
    again = KeptPrograms(tmp_path / "rank_1").compile(lowered(2.0))
    assert counter.count == was
    assert results(again) == expected
    given = jnp.array(X)
    again(X, given)
    assert given.is_deleted()


def test_a_program_that_calls_python_is_compiled_but_not_kept(tmp_path, capfd):
    def printing(x):
        jax.debug.print("the sum is {}", x.sum())
        return x + 1

    for _ in range(2):
        program = KeptPrograms(tmp_path / "rank_0").compile(jax.jit(printing).lower(X))
        np.testing.assert_array_equal(program(X), X + 1)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("the sum is 512.0") == 2
    assert not (tmp_path / "rank_0").exists()


def test_unused_arguments_are_part_of_the_name(tmp_path):
    def casts_nothing(weights, x):
        return {"half": x.astype(jnp.bfloat16)}

    for length in (1, 2):
        weights = jnp.zeros((length, 32))
        program = KeptPrograms(tmp_path).compile(jax.jit(casts_nothing).lower(weights, X))
        assert program(weights, X)["half"].dtype == jnp.bfloat16
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("changed", "scale"),
    [
        ({}, 3.0),
        ({"XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=7"}, 2.0),
        ({"NPROC": "3"}, 2.0),  # XLA cuts the loops of a CPU's programs into as many parts
    ],
)
def test_another_program_or_platform_is_another_entry(tmp_path, monkeypatch, changed, scale):
    monkeypatch.delenv("NPROC", raising=False)
    before = results(KeptPrograms(tmp_path).compile(lowered(2.0)))
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    after = results(KeptPrograms(tmp_path).compile(lowered(scale)))
    assert (after == before) == (scale == 2.0)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"nonsense"])
def test_a_damaged_entry_is_logged_and_recompiled(tmp_path, caplog, damage):
    expected = results(KeptPrograms(tmp_path).compile(lowered(2.0)))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        assert results(KeptPrograms(tmp_path).compile(lowered(2.0))) == expected
    assert "it is compiled again" in caplog.text
    assert results(KeptPrograms(tmp_path).compile(lowered(2.0))) == expected


def test_no_flipped_bit_is_ever_loaded(tmp_path, caplog, monkeypatch):
    """With a wrong bit XLA may compute something else, end the process or hang."""
    KeptPrograms(tmp_path).compile(lowered(2.0))
    (path,) = tmp_path.iterdir()
    whole, rng = path.read_bytes(), random.Random(7)
    loaded = []
    monkeypatch.setattr(serialize_executable, "deserialize_and_load", loaded.append)
    for bit in rng.sample(range(8 * len(whole)), 40):
        path.write_bytes(flipped(whole, bit))
        KeptPrograms(tmp_path).compile(lowered(2.0))
    assert loaded == []
    assert caplog.text.count("not those that were written; it is compiled again") == 40


def flipped(content, bit):
    at, mask = bit // 8, 1 << bit % 8
    return content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :]


def test_an_unwritable_folder_is_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("precious")
    with caplog.at_level(logging.WARNING):
        program = KeptPrograms(tmp_path / "file").compile(lowered(2.0))
    assert results(program) == results(lowered(2.0).compile())
    assert "cannot be kept" in caplog.text
    assert (tmp_path / "file").read_text() == "precious"


def one_step(model):
    """Build a stage; returns its results for a microbatch."""
    stage = build_stage(
        model,
        stage_submesh(make_mesh(1), 0),
        num_layers=2,
        is_first=True,
        is_last=True,
        shapes=MicrobatchShapes.of_text(2, 8),
    )
    params = init_stage_params(model, jax.random.key(3), range(2), is_first=True, is_last=True)
    tokens = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
    weights = stage.prepare(params)
    gradient, stash, *_ = stage.forward(weights, tokens, tokens)
    _, weight_stash, _ = stage.backward_input(weights, stash, gradient)
    sums, _ = stage.backward_weight(weights, (weight_stash,), stage.zero_accumulators())
    return [leaf.tobytes() for leaf in jax.device_get(jax.tree.leaves((gradient, sums)))]


def test_a_stage_built_again_compiles_no_program(tmp_path, counter):
    model = build(
        preset="tiny", width=16, num_heads=2, num_layers=2, sequence_length=8, vocab_size=32
    )
    try:
        compile_by(KeptPrograms(tmp_path).compile)
        expected, first = one_step(model), counter.count
        again = one_step(model)
        second = counter.count - first
    finally:
        compile_by(None)
    assert again == expected
    assert len(list(tmp_path.iterdir())) == len(("prepare", "zero", *OP_KINDS))
    assert second <= first - len(OP_KINDS)


@pytest.fixture
def keepers(monkeypatch):
    """Records which `KeptPrograms` compiles for this process, during one test."""
    keepers = []
    monkeypatch.setattr(
        kept_programs, "compile_by", lambda how: keepers.append(how.__self__) if how else None
    )
    return keepers


def keeping(wanted):
    return check_config({"restart_policy": {"compilation_cache": wanted}})


@pytest.mark.parametrize(
    ("wanted", "name"),
    [("auto", "cache"), (True, "run/compilation_cache"), ("kept", "kept")],
)
def test_a_rank_keeps_its_programs_apart(keepers, tmp_path, monkeypatch, wanted, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXMORPH_CACHE_DIR", str(tmp_path / "cache"))
    with keep_compiled(keeping(wanted), tmp_path / "run", 2):
        (programs,) = keepers
    assert programs.folder == tmp_path / name / "rank_2"


def test_a_users_cache_is_in_the_home_directory(keepers, tmp_path, monkeypatch):
    for name in ("JAXMORPH_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with keep_compiled(keeping("auto"), tmp_path / "run", 0):
        (programs,) = keepers
    folder = tmp_path / ".cache/jaxmorph"
    assert programs.folder == folder / "rank_0"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_rank_keeps_its_programs_no_longer_than_asked(tmp_path, monkeypatch):
    set_to = []
    monkeypatch.setattr(kept_programs, "compile_by", set_to.append)
    with keep_compiled(keeping(True), tmp_path, 0):
        assert [how is None for how in set_to] == [False]
    assert [how is None for how in set_to] == [False, True]


def test_nothing_is_kept_where_that_is_not_wanted(keepers, tmp_path):
    with keep_compiled(keeping(False), tmp_path, 0) as programs_ran:
        programs_ran()
    with keep_compiled(keeping(True), None, 0) as programs_ran:  # there is no run directory
        programs_ran()
    assert keepers == []
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMORPH_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    return tmp_path / "cache"


def test_a_cache_that_others_can_write_to_is_not_used(keepers, users_cache, caplog):
    users_cache.chmod(0o770)
    with keep_compiled(keeping("auto"), users_cache, 0):
        assert keepers == []
    assert "others can write there" in caplog.text


def test_another_users_cache_is_not_used(keepers, users_cache, monkeypatch):
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with keep_compiled(keeping("auto"), users_cache, 0):
        assert keepers == []


def test_without_a_folder_nothing_is_kept(keepers, users_cache, caplog):
    users_cache.rmdir()
    users_cache.touch()
    with keep_compiled(keeping("auto"), users_cache, 0) as programs_ran:
        programs_ran()
    assert keepers == []
    assert "no compiled program is kept: [Errno 17] File exists" in caplog.text


@pytest.fixture
def start(keepers, tmp_path, counter):
    """Starts a rank that compiles a program; returns how often XLA did."""

    def start(scale=2.0, *, fails=False):
        before = counter.count
        with suppress(OSError), keep_compiled(keeping(True), tmp_path, 0) as programs_ran:
            keepers[-1].compile(lowered(scale))
            if fails:
                raise OSError("a lost peer")
            programs_ran()
        return counter.count - before

    return start


@pytest.fixture
def read_by_another(start, keepers, tmp_path):
    """A program that another process reads; it may be killed before its first step."""
    assert [start(), start(fails=True), start()] == [1, 0, 0]
    with keep_compiled(keeping(True), tmp_path, 0):
        keepers[-1].compile(lowered(2.0))
        mark = keepers[-1]._on_read.__self__
        yield mark._file.close  # as the end of a process does, which frees its locks


def test_after_a_killed_start_nothing_that_it_read_is_used(start, read_by_another, caplog):
    read_by_another()
    assert [start(scale) for scale in (3.0, 2.0, 2.0)] == [1, 1, 0]
    assert caplog.text.count("what it had read is compiled again") == 1


def test_a_start_beside_another_uses_what_is_kept(start, read_by_another):
    assert start() == 0


def test_without_locks_every_mark_is_one_of_a_killed_start(start, read_by_another, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert [start(), start()] == [1, 0]


def test_no_mark_stays_after_the_first_step(start, tmp_path):
    for fails in (False, True):
        start(fails=fails)
        names = [path.suffix for path in (tmp_path / "compilation_cache/rank_0").iterdir()]
        assert names == [".program"]


def test_what_nothing_reads_is_removed_after_a_month(start, tmp_path):
    folder = tmp_path / "compilation_cache"
    start(2.0)
    start(3.0)
    (folder / "rank_1").mkdir()
    for name in ("of_another_rank.program", "half.new", "notes.txt"):
        (folder / "rank_1" / name).touch()
    long_ago_s = time.time() - 40 * 24 * 3600
    for path in folder.glob("rank_*/*"):
        os.utime(path, (long_ago_s, long_ago_s))
    assert start(2.0) == 0
    left = {path.name: path.stat().st_mtime for path in folder.glob("rank_*/*")}
    assert len(left) == 2
    assert left.pop("notes.txt") == pytest.approx(long_ago_s)
    assert min(left.values()) > long_ago_s
