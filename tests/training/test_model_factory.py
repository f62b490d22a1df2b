"""Which options decide the model and where it is found, and which how it is computed."""

import sys
from functools import partial
from typing import Any

import jax
import pytest

import jaxmorph
from jaxmorph.checkpoints.manifest import Manifest
from jaxmorph.config import Config, dump_config, load_config
from jaxmorph.errors import UserError
from jaxmorph.models import gpt2, llama
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.stage.model import MicrobatchShapes
from jaxmorph.training import run_parts
from jaxmorph.training.model_factory import (
    build_model,
    changeable_options,
    load_factory,
    without_changeable_options,
)
from jaxmorph.training.run_parts import check_together


def configured(**model):
    sections = {"model": {"preset": "tiny", **model}, "precision": {"compute": "bfloat16"}}
    return Config.model_validate(sections)


def built(config):
    """The sizes of the built model."""
    model: Any = build_model(config, 16)
    return model.config


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Three folders that Python searches in turn, each with more modules than the one before."""
    folders = [tmp_path / name for name in ("installed", "config", "current")]
    modules = (["first"], ["first", "second"], ["first", "second", "third"])
    for folder, names in zip(folders, modules, strict=True):
        folder.mkdir()
        for name in names:
            path = folder / f"{name}_searched_model.py"
            path.write_text(f"def build(**options): return {folder.name!r}\n")
    monkeypatch.chdir(folders[2])
    path = [str(folders[2]), str(folders[0]), *sys.path]  # as `python -m` has it
    monkeypatch.setattr(sys, "path", path)
    known = set(sys.modules)
    yield folders
    for name in sys.modules.keys() - known:
        if name.endswith(("_searched_model", "no_factory")):
            del sys.modules[name]


@pytest.mark.parametrize("factory", ["gpt2", "llama"])
def test_changeable_options_are_removed(factory):
    config = configured(factory=factory, attention="cudnn", num_layers=2)
    assert built(config).attention == "cudnn"
    anywhere = without_changeable_options(config)
    assert anywhere.model.options == {"num_layers": 2}
    assert anywhere.model.factory == factory
    assert anywhere.precision == config.precision
    assert built(anywhere).attention == "auto"


@pytest.mark.parametrize("prefix", ["", "models.", "jaxmorph.models."])
def test_names_of_a_shipped_model_give_one_module(prefix):
    assert load_factory(f"{prefix}gpt2") is gpt2
    assert load_factory(f"{prefix}llama") is llama
    assert configured(factory=f"{prefix}llama").model.factory == "llama"


def test_older_manifests_name_the_same_model():
    manifest = Manifest(1, (range(1),), 16, (), configured()).to_json()
    manifest["config"]["model"]["factory"] = "models.gpt2"
    del manifest["config"]["model"]["folder"]
    assert Manifest.from_json(manifest).config.model == configured().model


def test_installed_modules_win_and_the_current_directorys_lose(folders):
    found = [
        load_factory(f"{name}_searched_model", str(folders[1])).build()
        for name in ("first", "second", "third")
    ]
    assert found == ["installed", "config", "current"]


def test_a_run_remembers_its_configurations_folder(folders):
    (folders[1] / "own.yaml").write_text("model: {factory: second_searched_model}\n")
    config = load_config("../config/own.yaml")
    copied = folders[0] / "config.yaml"
    copied.write_text(dump_config(config))
    assert load_config(copied) == config
    assert load_config(copied, ["model.folder=."]).model.folder == str(folders[2])
    assert load_factory(config.model.factory, config.model.folder).build() == "config"


def test_a_run_remembers_the_current_directory_if_the_module_is_there(folders):
    (folders[1] / "own.yaml").write_text("model: {factory: third_searched_model}\n")
    assert load_config("../config/own.yaml").model.folder == str(folders[2])


@pytest.mark.parametrize("file", ["gpt2.py", "gpt2/__init__.py", "models/gpt2.py"])
def test_an_own_module_with_a_shipped_models_name_is_refused(folders, file):
    own = folders[1] / file
    own.parent.mkdir(exist_ok=True)
    own.write_text("def build(**options): return 'own'\n")
    name = "models.gpt2" if "models" in file else "gpt2"
    config = folders[1] / "own.yaml"
    config.write_text(f"model: {{factory: {name}}}\n")
    with pytest.raises(UserError) as caught:
        load_config(config)
    assert str(caught.value) == (
        f"{config}: model.factory: got {name!r}, which is also the name of {own}, "
        "expected jaxmorph.models.gpt2, or your module under another name"
    )
    chosen = load_config(config, ["model.factory=jaxmorph.models.gpt2"])
    config.write_text(dump_config(chosen))
    assert load_config(config).model.factory == "gpt2"


def test_a_checkout_without_links_is_a_users_mistake(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("jaxmorph.models")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(jaxmorph, "__path__", [])
    with pytest.raises(UserError, match=r"^model\.factory: .*/jaxmorph/models: got a checkout"):
        load_factory("gpt2")


def test_a_missing_factory_is_a_users_mistake(folders):
    (folders[1] / "no_factory.py").touch()
    expected = (
        "expected gpt2, llama, or a module with a function 'build' among the installed packages or "
        f"in {folders[1]} or {folders[2]}"
    )
    for name, got in (("none.such", ""), ("no_factory", " without a function 'build'")):
        with pytest.raises(UserError) as caught:
            load_factory(name, str(folders[1]))
        assert str(caught.value) == f"model.factory: got {name!r}{got}, {expected}"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import none_such", "{}:1: import of {}: ModuleNotFoundError: No module named '"
            "none_such'"),
        ("\n1 / 0", "{}:2: import of {}: ZeroDivisionError: division by zero"),
        ("def build(:", "model.factory: import of {0}: SyntaxError: invalid syntax ({1}, line 1)"),
        ("def build(**_):\n  raise KeyError('small')", "{}:2: build: KeyError: 'small'"),
        ("def build(**_):\n  int('a')", "{}:2: build: ValueError: invalid literal for int() with "
            "base 10: 'a'"),
        ("def build(**_):\n  raise ValueError('width: got 5')", "model.width: got 5"),
        ("def build(): pass", "model: build() got an unexpected keyword argument 'preset'"),
        ("def build(**_): pass", "model: got NoneType without init_embed, init_layer, init_head, "
            "embed, layer, head, expected an object with the functions init_embed, init_layer, "
            "init_head, embed, layer, head"),
    ],
)  # fmt: skip
def test_what_a_module_raises_is_one_line_with_its_place(folders, source, says):
    name = f"number_{len(source)}_no_factory"
    (folders[1] / f"{name}.py").write_text(source)
    own = {"factory": name, "folder": str(folders[1])}
    with pytest.raises(UserError) as caught:
        build_model(configured(**own), 16)
    file = f"{name}.py"
    assert str(caught.value) == says.format(*((file, name) if says[0] == "{" else (name, file)))


def test_a_factory_needs_no_changeable_options(folders):
    assert changeable_options(configured(factory="third_searched_model").model) == ()


def test_only_jaxmorphs_own_models_on_text_are_not_checked(monkeypatch):
    checked = []
    monkeypatch.setattr(run_parts, "check_model", lambda model, *_: checked.append(model) or ("x",))
    own: Any = build_model(configured(), 16)
    text = MicrobatchShapes.of_text(2, 4)
    floats = MicrobatchShapes(jax.ShapeDtypeStruct((2, 4), "float32"), text.targets)
    users: Any = type("Users", (type(own),), {})(own.config)
    check = partial(check_together, configured(), SoleRank())
    assert [check(own, text), check(own, floats), check(users, text)] == [(), ("x",), ("x",)]
    assert checked == [own, users]
