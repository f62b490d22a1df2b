"""The configurations that the package brings are the repository's."""

from pathlib import Path

import pytest

from jaxmorph.config import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["demo", "llama"])
def test_the_file_is_the_repositorys(run, tmp_path, name):
    written = tmp_path / "a folder" / f"{name}.yaml"
    said = f"wrote {written}: jaxmorph train '{written}'\n"
    assert run("init", name, written.parent) == (0, said, "")
    assert written.read_bytes() == (CONFIGS / f"{name}.yaml").read_bytes()
    assert load_config(written).model.folder is None


def test_nothing_is_overwritten(run, expect_mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("demo.yaml").write_text("mine\n")
    expect_mistake("DIR: got ., expected a folder without demo.yaml", "init")
    assert Path("demo.yaml").read_text() == "mine\n"
    expect_mistake("DIR: got demo.yaml, expected a folder", "init", "demo", "demo.yaml")
    names = "demo, llama, own-model"
    expect_mistake(f"NAME: got 'none', expected one of {names}", "init", "none")
    assert run("init", "llama")[0] == 0


def test_an_own_model_is_a_module_that_its_configuration_finds(run, expect_mistake, tmp_path):
    config, module = tmp_path / "causal_mixer.yaml", tmp_path / "causal_mixer.py"
    said = f"wrote {config} and {module}: jaxmorph train {config}\n"
    assert run("init", "own-model", tmp_path) == (0, said, "")
    assert load_config(config).model.factory == module.stem
    config.unlink()
    module.write_text("mine\n")
    expect_mistake(
        f"DIR: got {tmp_path}, expected a folder without causal_mixer.py",
        "init", "own-model", tmp_path,
    )  # fmt: skip
    assert (module.read_text(), config.exists()) == ("mine\n", False)
