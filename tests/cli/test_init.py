"""The configurations that the package brings are the repository's."""

from pathlib import Path

import pytest

from jaxmorph.config import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["demo", "llama"])
def test_the_file_is_the_repositorys(run, tmp_path, name):
    written = tmp_path / "a folder" / f"{name}.yaml"
    said = f"wrote {written}: jaxmorph train '{written}'\n"
    assert run("init", written.parent, "--name", name) == (0, said, "")
    assert written.read_bytes() == (CONFIGS / f"{name}.yaml").read_bytes()
    assert load_config(written).model.folder is None


def test_nothing_is_overwritten(run, expect_mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("demo.yaml").write_text("mine\n")
    expect_mistake("DIR: got ., expected a folder without demo.yaml", "init")
    assert Path("demo.yaml").read_text() == "mine\n"
    expect_mistake("DIR: got demo.yaml, expected a folder", "init", "demo.yaml")
    expect_mistake("--name: got 'none', expected one of demo, llama", "init", "--name", "none")
    assert run("init", "--name", "llama")[0] == 0
