"""What a trainer refuses before it compiles anything."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxmorph import meeting
from jaxmorph.config import check_config
from jaxmorph.errors import UserError
from jaxmorph.runtime.rank_process import RankArguments
from jaxmorph.script_config import configure
from jaxmorph.trainer import Trainer

MODEL: Any = SimpleNamespace(num_layers=2, tied=())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"parallelism": {"stages": 2}},
            "parallelism.stages: got 2, expected the number of the script's processes, 1 "
            "(`jaxmorph launch --stages 2 SCRIPT` starts 2 here)",
        ),
        (
            {"batch": {"microbatchs": 4}},
            "config: batch.microbatchs: unknown key; did you mean 'microbatches'?",
        ),
        (
            {"timeouts": {"step_s": object}},
            "config: timeouts.step_s: got <class 'object'>, expected a number above 0",
        ),
        ({"parallelism": 3}, "config: parallelism: got 3, expected a section of keys"),
        (7, "config: got int, expected a mapping of sections, a path or a Config"),
        ("none.yaml", "none.yaml: no such file, expected a YAML file"),
        (
            {"parallelism": {"layers": [3]}},
            "parallelism.layers: got [3], expected 1 positive counts",
        ),
        (
            {"schedule": {"name": "interleaved"}, "parallelism": {"chunks": 3}},
            "parallelism.chunks: got 3 chunks on each of 1 stages",
        ),
        ({"model": {"weights": "nowhere"}}, "model.weights"),
    ],
)
def test_what_does_not_fit_is_one_line(config, says):
    with pytest.raises(UserError) as caught:
        Trainer(MODEL, config)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_a_configuration_may_be_a_mapping_a_file_or_typed(tmp_path):
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


def test_a_trainer_that_comes_after_jax_has_begun_is_told_to_come_first(monkeypatch):
    jax.devices()
    monkeypatch.setattr(meeting, "_met", [])
    monkeypatch.setattr(meeting, "launch_told", lambda: RankArguments(0, 2, "127.0.0.1:1", 0, 0))
    monkeypatch.setenv("XLA_FLAGS", "")  # joining adds to them
    with pytest.raises(UserError, match=r"^Trainer: JAX has computed something already.*join\(\)"):
        Trainer(MODEL, {})
