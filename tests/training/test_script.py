"""A script's batches, and how its processes meet and end."""

import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.config import Config, check_config
from jaxmorph.errors import UserError
from jaxmorph.models.gpt2 import build
from jaxmorph.runtime.join import Joining
from jaxmorph.runtime.rank_process import RankArguments
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.stage.model import vocabulary_of
from jaxmorph.training import script
from jaxmorph.training.script import configure, cut_batch, example_shapes

CONFIG = check_config(
    {
        "batch": {"microbatches": 3, "microbatch_size": 2},
        "data": {"sequence_length": 4},
        "parallelism": {"stages": 3},
    }
)
TOKENS = np.arange(24).reshape(6, 4)


def test_stages_get_tokens_targets_or_neither():
    targets = np.where(TOKENS % 4 == 0, -1, TOKENS)
    first, middle, last = (cut_batch((TOKENS, targets), CONFIG, rank) for rank in range(3))
    assert first.targets is middle.inputs is middle.targets is last.inputs is None
    assert first.inputs is not None
    assert last.targets is not None
    assert first.inputs.tolist() == TOKENS.reshape(3, 2, 4).tolist()
    assert last.targets.tolist() == targets.reshape(3, 2, 4).tolist()
    assert first.inputs.dtype == last.targets.dtype == np.int32
    assert first.loss_weight == middle.loss_weight == last.loss_weight == 1 / 18


def test_batches_may_be_jax_arrays_and_cut():
    one = Config(batch=CONFIG.batch, data=CONFIG.data)
    given = jnp.asarray(TOKENS.reshape(3, 2, 4), jnp.uint8)
    inputs = cut_batch([given, given], one, 0)
    assert inputs.inputs is not None
    assert inputs.targets is not None
    assert inputs.inputs.tolist() == inputs.targets.tolist() == given.tolist()


def test_a_batch_without_targets_weighs_nothing():
    assert cut_batch((TOKENS, TOKENS * 0 - 1), CONFIG, 2).loss_weight == 1.0


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (TOKENS, "got ndarray, expected a pair of tokens and targets"),
        (7, "got int, expected a pair of tokens and targets"),
        ((TOKENS[:5], TOKENS), r"got tokens of shape \[5, 4\], expected \[6, 4\]: batch.micro"),
        ((TOKENS, TOKENS.T), r"got targets of shape \[4, 6\], expected \[6, 4\]"),
        ((TOKENS, TOKENS * 1.0), "got targets of float64, expected whole numbers"),
        ((TOKENS > 3, TOKENS), "got tokens of bool, expected whole numbers"),
    ],
)
def test_any_other_batch_is_refused(batch, says):
    with pytest.raises(UserError, match=f"^batch: {says}"):
        cut_batch(batch, CONFIG, 0)


FLOATS = np.linspace(0, 1, 30).reshape(6, 5)
EXAMPLE = {"x": FLOATS, "at": TOKENS}, np.arange(6), {"mask": {"of": TOKENS > 3}}


def test_batches_may_be_trees_of_any_dtype():
    shapes = example_shapes(EXAMPLE, CONFIG)
    assert shapes is not None
    assert (shapes.inputs["x"].shape, shapes.inputs["x"].dtype) == ((2, 5), np.float32)
    first, middle, last = (
        cut_batch(EXAMPLE, CONFIG, rank, None, shapes, reads_extras=rank > 0) for rank in range(3)
    )
    assert first.targets is middle.inputs is last.inputs is None
    assert first.extras == {}
    assert jax.tree.map(np.shape, first.inputs) == {"x": (3, 2, 5), "at": (3, 2, 4)}
    assert last.targets.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert middle.extras["mask"]["of"].dtype == bool
    assert last.loss_weight == 1 / 6
    weighed = (EXAMPLE[0], (EXAMPLE[1], FLOATS))
    shapes = example_shapes(weighed, CONFIG)
    uncounted = (EXAMPLE[0], (EXAMPLE[1] * 0 - 1, FLOATS))
    assert cut_batch(uncounted, CONFIG, 0, None, shapes).loss_weight == 1 / 6


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((EXAMPLE[0], EXAMPLE[1]), "got extras as"),
        (({"x": FLOATS}, *EXAMPLE[1:]), "got inputs as"),
        ((EXAMPLE[0], FLOATS, EXAMPLE[2]), "got targets of float64, expected whole numbers"),
        (
            (EXAMPLE[0], EXAMPLE[1].astype(np.int64) + 2**40, EXAMPLE[2]),
            "got targets with numbers beyond int32, such as 1099511627776, expected the example",
        ),
        (
            ({"x": FLOATS[:, :4], "at": TOKENS}, *EXAMPLE[1:]),
            r"got inputs\['x'\] of shape \[6, 4\], expected \[6, 5\]: batch.microbatches times",
        ),
    ],
)
def test_other_trees_than_the_example_are_refused(batch, says):
    with pytest.raises(UserError, match=f"^batch: {says}"):
        cut_batch(batch, CONFIG, 0, None, example_shapes(EXAMPLE, CONFIG))


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ((FLOATS[:5], FLOATS), r"got inputs of shape \[5, 5\], expected \[6, ...\]: batch.micro"),
        ((FLOATS, "text"), "got targets of shape"),
        ((FLOATS, ()), "got targets without arrays"),
        ((FLOATS, FLOATS, [FLOATS]), "got extras of list, expected a dictionary"),
        ((FLOATS, {"a": object()}), r"got targets\['a'\] of object, expected arrays"),
    ],
)
def test_an_example_that_is_no_batch_is_refused(example, says):
    with pytest.raises(UserError, match=f"^example: {says}"):
        example_shapes(example, CONFIG)


def test_a_batch_is_cut_like_the_example_of_its_length():
    at_most = [({"x": FLOATS[:, :size], "at": TOKENS}, *EXAMPLE[1:]) for size in (5, 3, 2)]
    shapes = example_shapes(at_most[0], CONFIG, at_most[1:])
    cut = [cut_batch(batch, CONFIG, 0, None, shapes) for batch in reversed(at_most)]
    assert [each.length_index for each in cut] == [2, 1, 0]
    assert [each.inputs["x"].shape for each in cut] == [(3, 2, size) for size in (2, 3, 5)]
    other = ({"x": FLOATS[:, :4], "at": TOKENS}, *EXAMPLE[1:])
    with pytest.raises(UserError, match=r"inputs\['x'\] of shape \[6, 4\], expected \[6, 5\]"):
        cut_batch(other, CONFIG, 0, None, shapes)
    with pytest.raises(UserError, match=r"^shorter: got examples, expected one"):
        example_shapes(None, CONFIG, at_most)


SCRIPT = """
import atexit, sys
from jaxmorph.errors import UserError
from jaxmorph.training.script import end_if_failed, end_on_uncaught_errors
end_on_uncaught_errors()
atexit.register(print, "cleaned up")
try:
    raise KeyError("caught")
except KeyError:
    print("went on")
"""


@pytest.mark.parametrize(
    ("ends", "code", "last_line"),
    [
        ("raise UserError('batch: a wombat')", 2, "jaxmorph.errors.UserError: batch: a wombat"),
        ("raise ArithmeticError('upside down')", 1, "ArithmeticError: upside down"),
        ("end_if_failed(SystemExit(3))", 3, ""),
        ("end_if_failed(SystemExit('no data'))", 1, "no data"),
        ("end_if_failed(SystemExit(None))", 0, ""),
    ],
)
def test_a_failing_end_skips_the_clean_up(ends, code, last_line):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + ends],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert done.stderr.splitlines()[-1:] == ([last_line] if last_line else [])
    assert len(done.stderr.splitlines()) <= 1 or ends.startswith("raise")
    assert done.stdout == "went on\n" + ("" if code else "cleaned up\n")


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((TOKENS, TOKENS), "got tokens from 0 to 23, expected ids from 0 to below 23, the model"),
        ((TOKENS - 1, TOKENS - 1), "got tokens from -1 to 22, expected ids from 0 to below 23"),
        ((TOKENS * 0, TOKENS), "got targets from 0 to 23, expected ids from 0 to below 23"),
    ],
)
def test_ids_beyond_the_models_vocabulary_are_refused(batch, says):
    for rank in range(3):
        with pytest.raises(UserError, match=f"^batch: {says}"):
            cut_batch(batch, CONFIG, rank, 23)


def test_the_vocabulary_is_that_of_the_logits():
    sizes = {"preset": "tiny", "width": 16, "num_heads": 2, "num_layers": 1}
    model = build(**sizes, sequence_length=8, vocab_size=77)
    assert vocabulary_of(model, 8) == 77
    assert vocabulary_of(cast(Any, object()), 8) is None


FAILS_OVER = {"failover": {"enabled": True}}
OPS_OF_18_S = {
    "batch": {"microbatches": 6},
    "emulation": {
        "accelerator": {
            "forward_ms": [500, 1000], "backward_input_ms": 1000, "backward_weight_ms": 1000,
        }
    },
}  # fmt: skip


def test_a_configuration_may_be_mapping_file_or_object(tmp_path):
    tree = {"batch": {"microbatches": 3}, "routes": {"default": "delegated"}, "run": {"steps": 50}}
    path = tmp_path / "run.yaml"
    path.write_text("batch: {microbatches: 3}\nroutes: {default: delegated}\nrun: {steps: 50}\n")
    given, _ = configure(tree)
    typed, _ = configure(check_config(tree))
    assert given == typed
    assert given.batch.microbatches == 3
    assert given.routes.default == "delegated"
    assert given.optimizer.warmup_steps == 5
    assert given.parallelism.stages == 1
    assert configure(path)[0].batch == configure(str(path))[0].batch == given.batch
    assert configure(None)[0].batch.microbatches == 8


def test_values_per_stage_need_no_stage_count(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "meet", lambda *_: SimpleNamespace(num_ranks=3))
    path = tmp_path / "mine.yaml"
    path.write_text("schedule: {max_live: [3, 2, 1]}\nroutes: {default: direct, 1-2: delegated}\n")
    config, _ = configure(path)
    assert config.parallelism.stages == 3
    assert config.routes.by_link == {"1-2": "delegated"}
    assert config.run.dir == "runs/mine"
    path.write_text("routes: {2-3: delegated}")
    with pytest.raises(UserError) as caught:
        configure(path)
    assert str(caught.value).startswith(f"{path}: routes.2-3: ")


@pytest.mark.parametrize(
    ("num_ranks", "sections", "waits_s", "known_by"),
    [
        (6, {}, 60.0, None),
        (6, {"adaptation": {"enabled": True}}, 15.0, None),
        (6, FAILS_OVER, 15.0, None),
        (6, FAILS_OVER | {"parallelism": {"stages": 6}}, 15.0, None),
        (6, FAILS_OVER | {"timeouts": {"direct_s": 2}}, 2.0, None),
        (6, {"timeouts": {"direct_s": 2}}, 60.0, None),  # a deadline of links that fail over
        (8, FAILS_OVER, 15.0, "job"),
        (10, FAILS_OVER, 15.0, "launcher"),
        (2, FAILS_OVER | OPS_OF_18_S, 18.0, "launcher"),  # one may wait behind those of a step
        (2, FAILS_OVER | OPS_OF_18_S, 15.0, None),  # they can't be checked yet
    ],
)
def test_transfers_wait_for_the_configured_time(
    monkeypatch, num_ranks, sections, waits_s, known_by
):
    waited_s = []

    def meet(joining, least_threads):
        assert joining.fails_over == (waits_s != 60.0)
        waited_s.append(joining.step_timeout_s)
        return SimpleNamespace(num_ranks=num_ranks)

    monkeypatch.setattr(script, "meet", meet)
    if known_by == "job":
        monkeypatch.setenv("SLURM_NTASKS", str(num_ranks))
    if known_by == "launcher":
        launched = RankArguments(0, num_ranks, "127.0.0.1:1", 0, 0)
        monkeypatch.setattr(script, "launch_arguments", lambda: launched)
    configure(sections)
    assert waited_s == [waits_s]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_trainer_after_an_error_is_refused(monkeypatch, num_ranks):
    met = SoleRank()
    met.num_ranks = num_ranks
    monkeypatch.setattr(script, "_left", [])
    monkeypatch.setattr(script, "_met", [(met, Joining(1.0, 1.0))])
    script.leave()
    if num_ranks == 1:
        assert configure({})[0].parallelism.stages == 1
        return
    with pytest.raises(UserError, match=r"^Trainer: an earlier trainer .* ended with an error"):
        configure({})


@pytest.mark.parametrize(
    ("given", "offloads", "has"),
    [(1, True, "4"), (1, False, "1"), (6, True, "6"), (None, True, "1")],
)
def test_offload_gets_threads_unless_configured(monkeypatch, given, offloads, has):
    """`jaxmorph launch` sets the number without knowing the script's configuration."""
    launched = RankArguments(0, 1, "127.0.0.1:1", 0, 0, num_threads=given)
    monkeypatch.setattr(script, "_met", [])
    monkeypatch.setattr(script, "launch_arguments", lambda: launched)
    monkeypatch.setattr(script, "join_run", lambda *_, **__: SoleRank())
    monkeypatch.setenv("NPROC", str(given or 1))
    configure({"offload": {"enabled": offloads}})
    assert os.environ["NPROC"] == has


@pytest.mark.parametrize(
    ("num_ranks", "joined", "sections", "says"),
    [
        (2, {}, FAILS_OVER, r"^failover.enabled: got .*: jaxmorph\.join\(fails_over=True\), or"),
        (2, {"fails_over": True}, FAILS_OVER, None),
        (1, {}, FAILS_OVER, None),
        (1, {}, {"parallelism": {"tensor": 999}}, r"^parallelism.tensor: got .*join\(tensor=999\)"),
        (1, {"tensor": 999}, {"parallelism": {"tensor": 999}}, None),
    ],
)
def test_a_trainer_needs_the_devices_of_join(monkeypatch, num_ranks, joined, sections, says):
    met = SoleRank()
    met.num_ranks = num_ranks
    monkeypatch.setattr(script, "_met", [])
    monkeypatch.setattr(script, "_join", lambda *_: met)
    script.join(**joined)
    with pytest.raises(UserError, match=says) if says else nullcontext():
        configure(sections)


def test_a_trainer_after_jax_is_refused(monkeypatch):
    jax.devices()
    monkeypatch.setattr(script, "_met", [])
    launched = RankArguments(0, 2, "127.0.0.1:1", 0, 0)
    monkeypatch.setattr(script, "launch_arguments", lambda: launched)
    monkeypatch.setenv("XLA_FLAGS", "")  # joining adds to them
    with pytest.raises(UserError, match=r"^Trainer: JAX has already computed something.*join\(\)"):
        configure({})
