"""What of a configuration says which model it is, and what how it is computed."""

from typing import Any

import pytest

from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.training.model_factory import build_model, device_options, for_any_device


def configured(**model):
    told = {"model": {"preset": "tiny", **model}, "precision": {"compute": "bfloat16"}}
    return Config.model_validate(told)


def built(config):
    """The sizes of what is built."""
    model: Any = build_model(config, 16)
    return model.config


@pytest.mark.parametrize("factory", ["models.gpt2", "models.llama"])
def test_a_model_for_any_device_is_the_same_but_for_its_device(factory):
    config = configured(factory=factory, attention="cudnn", num_layers=2)
    assert built(config).attention == "cudnn"
    anywhere = for_any_device(config)
    assert anywhere.model.options == {"num_layers": 2}
    assert anywhere.model.factory == factory
    assert anywhere.precision == config.precision
    assert built(anywhere).attention == "auto"


def test_a_factory_need_not_say_anything_of_devices(tmp_path, monkeypatch):
    (tmp_path / "silent_factory.py").write_text("def build(**options): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert device_options("silent_factory") == ()
    with pytest.raises(UserError, match=r"model\.factory: got 'no_such_factory'"):
        device_options("no_such_factory")
