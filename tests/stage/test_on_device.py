"""What a model says that it takes of the device, before a stage is made of it."""

from types import SimpleNamespace
from typing import Any

import pytest

import jaxmorph
from jaxmorph.errors import UserError
from jaxmorph.stage.on_device import taken_on_device
from models import attention, gpt2

SIZES: dict[str, Any] = {"preset": "tiny", "sequence_length": 8, "vocab_size": 16}


def build(**options):
    return gpt2.build(**SIZES, compute_dtype="bfloat16", **options)


def test_a_model_without_a_choice_takes_nothing():
    model: Any = SimpleNamespace(num_layers=1)
    assert taken_on_device(model, 2, 8) == ""


def test_on_a_cpu_there_is_nothing_to_tell():
    assert taken_on_device(build(), 2, 8) == ""


@pytest.mark.parametrize(
    ("by", "reason", "told"),
    [
        ("auto", None, "attention is cuDNN's"),
        ("auto", "no engine", "attention is XLA's, not cuDNN's: no engine"),
        ("xla", "no engine", ""),
    ],
)
def test_on_a_gpu_it_tells_what_computes_attention_and_why(monkeypatch, by, reason, told):
    gpu = SimpleNamespace(platform="gpu")
    monkeypatch.setattr("models.in_pieces.default_device", lambda: gpu)
    monkeypatch.setattr(attention, "why_not_cudnn", lambda *arguments: reason)
    assert taken_on_device(build(attention=by), 2, 8) == told


def test_what_is_named_and_absent_is_the_users_mistake():
    says = r"^model\.attention: got 'cudnn', expected auto or xla here: JAX computes on cpu"
    with pytest.raises(UserError, match=says):
        taken_on_device(build(attention="cudnn"), 2, 8)


def test_a_trainer_says_so_before_it_compiles_anything():
    config = {"data": {"sequence_length": 8}, "precision": {"compute": "bfloat16"}}
    with pytest.raises(UserError, match=r"^model\.attention: got 'cudnn'"):
        jaxmorph.Trainer(build(attention="cudnn"), config)
