"""How layers are cut into stages, and how a model chooses by the device."""

from types import SimpleNamespace
from typing import Any

import pytest

import jaxmorph
from jaxmorph.errors import UserError
from jaxmorph.models import attention, gpt2
from jaxmorph.stage.model import cut_layers, device_choices


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "counts"),
    [
        (8, 4, [2, 2, 2, 2]),
        (22, 4, [5, 6, 6, 5]),
        (9, 4, [2, 3, 2, 2]),
        (38, 8, [4, 5, 5, 5, 5, 5, 5, 4]),
        (3, 3, [1, 1, 1]),
        (5, 1, [5]),
    ],
)
def test_even_cut_gives_the_remainder_to_the_middle(num_layers, num_stages, counts):
    ranges = cut_layers(num_layers, num_stages)
    assert [len(r) for r in ranges] == counts
    assert [layer for r in ranges for layer in r] == list(range(num_layers))


def test_counts_may_be_given():
    assert cut_layers(6, 3, [1, 3, 2]) == (range(1), range(1, 4), range(4, 6))


@pytest.mark.parametrize("layers", [[1, 2], [3, 3, 1], [6, 0, 0], [2, 2, 2, 0]])
def test_counts_must_fit(layers):
    with pytest.raises(UserError, match=r"parallelism\.layers: got .*3 positive .* 6 layers"):
        cut_layers(6, 3, layers)


@pytest.mark.parametrize("num_stages", [0, 9])
def test_there_are_at_most_as_many_stages_as_layers(num_stages):
    with pytest.raises(UserError, match=rf"parallelism\.stages: got {num_stages}, .* 8 layers"):
        cut_layers(8, num_stages)


def test_chunks_take_layers_in_pipeline_order():
    counts = [len(part) for part in cut_layers(12, 3, num_chunks=2)]
    assert counts == [2] * 6
    assert cut_layers(7, 2, [1, 2, 3, 1], num_chunks=2)[2] == range(3, 6)


@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "says"),
    [
        (3, 3, "got 3 chunks on each of 3 stages, expected at most as many virtual stages in all"),
        (2, 2, "got 2 chunks on each of 2 stages, .* 6 layers to be a multiple of 4, or a list in"),
    ],
)
def test_layers_that_chunks_do_not_divide_are_refused(num_stages, num_chunks, says):
    with pytest.raises(UserError, match=rf"parallelism\.chunks: {says}"):
        cut_layers(6, num_stages, num_chunks=num_chunks)


def test_counts_are_those_of_virtual_stages():
    with pytest.raises(UserError, match=r"4 positive counts \(one per virtual stage\) .* 6 layers"):
        cut_layers(6, 2, [3, 3], num_chunks=2)


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
