"""Which options decide the model, and which how it is computed."""

from typing import Any

import pytest

from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.training.model_factory import build_model, device_options, for_any_device


def configured(**model):
    sections = {"model": {"preset": "tiny", **model}, "precision": {"compute": "bfloat16"}}
    return Config.model_validate(sections)


def built(config):
    """The sizes of the built model."""
    model: Any = build_model(config, 16)
    return model.config


@pytest.mark.parametrize("factory", ["models.gpt2", "models.llama"])
def test_device_options_are_removed(factory):
    config = configured(factory=factory, attention="cudnn", num_layers=2)
    assert built(config).attention == "cudnn"
    anywhere = for_any_device(config)
    assert anywhere.model.options == {"num_layers": 2}
    assert anywhere.model.factory == factory
    assert anywhere.precision == config.precision
    assert built(anywhere).attention == "auto"


def test_a_factory_needs_no_device_options(tmp_path, monkeypatch):
    (tmp_path / "silent_factory.py").write_text("def build(**options): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert device_options("silent_factory") == ()
    with pytest.raises(UserError, match=r"model\.factory: got 'no_such_factory'"):
        device_options("no_such_factory")
