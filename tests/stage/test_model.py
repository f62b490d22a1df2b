"""How a model chooses by the device."""

from types import SimpleNamespace
from typing import Any

import pytest

import jaxmorph
from jaxmorph.errors import UserError
from jaxmorph.models import attention, gpt2
from jaxmorph.stage.model import device_choices

SIZES: dict[str, Any] = {"preset": "tiny", "sequence_length": 8, "vocab_size": 16}


def build(**options):
    return gpt2.build(**SIZES, compute_dtype="bfloat16", **options)


def test_a_model_without_choices_describes_none():
    model: Any = SimpleNamespace(num_layers=1)
    assert device_choices(model, 2, 8) == ""


def test_on_a_cpu_there_is_nothing_to_describe():
    assert device_choices(build(), 2, 8) == ""


@pytest.mark.parametrize(
    ("requested", "why_not", "described"),
    [
        ("auto", None, "attention is cuDNN's"),
        ("auto", "no engine", "attention is XLA's, not cuDNN's: no engine"),
        ("xla", "no engine", ""),
    ],
)
def test_on_a_gpu_the_choice_of_attention_is_described(monkeypatch, requested, why_not, described):
    gpu = SimpleNamespace(platform="gpu")
    monkeypatch.setattr("jaxmorph.models.in_pieces.default_device", lambda: gpu)
    monkeypatch.setattr(attention, "why_not_cudnn", lambda *arguments: why_not)
    assert device_choices(build(attention=requested), 2, 8) == described


def test_a_trainer_refuses_absent_cudnn_before_compiling():
    config = {"data": {"sequence_length": 8}, "precision": {"compute": "bfloat16"}}
    with pytest.raises(UserError, match=r"^model\.attention: got 'cudnn'"):
        jaxmorph.Trainer(build(attention="cudnn"), config)
