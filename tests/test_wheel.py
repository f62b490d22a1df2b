"""What is built from this tree, and from its source distribution, trains in a new environment."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import jaxmorph

ROOT = Path(__file__).parent.parent
LIMIT_S = 240

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.in_ci, pytest.mark.one_jax]


def call(*words, cwd, code=0):
    """What a command prints, without this tree on Python's path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the tree's wheel and source distribution."""
    folder = tmp_path_factory.mktemp("built")
    got = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder / "backend",
         *tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if got.returncode:
        pytest.skip(f"no build backend to be had here: {got.stderr.strip()[-300:]}")
    build(folder, ROOT, folder)
    return folder


def build(folder, source, to, *options):
    code = "import sys; sys.path.append(sys.argv.pop(1)); from hatchling.cli import hatchling"
    words = (folder / "backend", "build", "-d", to, *options)
    call(sys.executable, "-c", f"{code}; hatchling()", *words, cwd=source)


@pytest.fixture(scope="module")
def command(built):
    """The command of an environment that has the wheel, and this one's other packages."""
    (wheel,) = built.glob("*.whl")
    folder = built / "environment"
    call(sys.executable, "-m", "venv", "--without-pip", folder, cwd=built)
    python = folder / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
    call(*pip, "--no-index", wheel, cwd=built)
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (own,) = (folder / "lib").glob("*/site-packages")
    (own / "others.pth").write_text("\n".join(others))
    where = call(python, "-c", "import jaxmorph; print(jaxmorph.__file__)", cwd=built)
    assert Path(where.strip()).is_relative_to(own)
    return folder / "bin/jaxmorph"


def test_the_wheel_has_models_and_configurations_and_no_relative_links(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        described = archive.read(metadata).decode()
    for source in (*(ROOT / "models").rglob("*.py"), *(ROOT / "jaxmorph").rglob("*.py")):
        name = str(source.relative_to(ROOT)).removeprefix("jaxmorph/")
        assert f"jaxmorph/{name}" in names
    assert "jaxmorph/cli/configs/demo.yaml" in names
    assert {name.partition("/")[0] for name in names} == {"jaxmorph", metadata.partition("/")[0]}
    assert f"Version: {jaxmorph.__version__}\n" in described
    assert "# jaxmorph\n" in described
    assert "*A step of" not in described  # the caption of a picture that isn't there
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", described) == []


def test_the_source_distribution_builds_the_same_wheel(built, tmp_path):
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    build(built, tree, tmp_path, "-t", "wheel")
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(tmp_path / wheel.name) as other:
        assert one.namelist() == other.namelist()
        assert all(one.read(name) == other.read(name) for name in one.namelist())


def test_a_new_environment_trains_the_demo(command, tmp_path):
    call(command, "init", "demo", "new", cwd=tmp_path)
    quickly = ("run.steps=2", "emulation.accelerator=null", "parallelism.stages=2")
    call(command, "train", "new/demo.yaml", *quickly, cwd=tmp_path)
    lines = (tmp_path / "runs/demo/metrics.jsonl").read_text().splitlines()
    assert 5.3 < json.loads(lines[0])["loss"] < 5.8
    assert len(lines) == 2


def test_a_model_beside_its_configuration_trains_and_samples_from_elsewhere(command, tmp_path):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    call(command, "init", "own-model", project, cwd=elsewhere)
    end = ("run.steps=2", f"run.dir={tmp_path / 'run'}", "checkpoint.every_steps=2")
    call(command, "train", project / "causal_mixer.yaml", *end, cwd=elsewhere)
    said = call(command, "sample", tmp_path / "run", "--prompt", "def", "--tokens", 2, cwd="/")
    assert said.startswith("def")
