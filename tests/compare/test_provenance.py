"""What results carry: the digest of what was measured, the commit that measured, others' work."""

import json
import platform
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import jaxmorph
from jaxmorph.compare.provenance import (
    ProcessorTimes,
    busy_ticks,
    configuration_digest,
    others_share,
    processor_times,
    provenance,
)
from jaxmorph.config import load_config
from jaxmorph.plain_json import parse
from jaxmorph.report.run_matrix import Provenance

CPUINFO = """processor : 0
model name\t: Some CPU @ 2.00GHz

processor : 1
model name\t: Some CPU @ 2.00GHz
"""
TEXT = """
parallelism: {stages: 4}
compare:
  systems: [zb]
  conditions: [{name: healthy}, {name: A, trace: delays.csv}]
"""


@pytest.fixture(autouse=True)
def _a_folder_with_a_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(TEXT)
    Path("delays.csv").write_text("step,link\n")


@pytest.mark.parametrize(("text", "ends"), [(CPUINFO, ", Some CPU @ 2.00GHz"), ("", "")])
def test_a_machine_is_named_with_its_processors(text, ends, monkeypatch):
    Path("cpuinfo").write_text(text)
    monkeypatch.setattr("jaxmorph.compare.provenance._CPUINFO", Path("cpuinfo"))
    kind = f"processors, {platform.system()} {platform.machine()}"
    assert provenance("x").machine.endswith(kind + ends)
    monkeypatch.setattr("jaxmorph.compare.provenance._CPUINFO", Path("none"))
    assert provenance("x").machine.endswith(kind)


def digest(*overrides: str) -> str:
    return configuration_digest(load_config("x.yaml", overrides))


@pytest.mark.parametrize(
    "override",
    [
        "run.dir=elsewhere",
        "compare.systems=[zb, adaptive]",
        "compare.bars=[{systems: [zb], at_most: 400}]",
        "compare.reference={zb: [1, 2]}",
        "compare.reference_source=a guess",
        "run.seed=0",  # as by default
        "compare.repeats=2",
    ],
)
def test_a_digest_is_of_what_is_measured(override):
    assert digest(override) == digest()


@pytest.mark.parametrize(
    "override", ["compare.steps=7", "compare.conditions.0.name=calm", "batch.microbatches=16"]
)
def test_what_is_measured_changes_the_digest(override):
    assert digest(override) != digest()


def test_a_traces_contents_change_the_digest():
    before = digest()
    Path("delays.csv").write_text("step,link,latency_ms\n")
    assert digest() != before


def test_provenance_survives_json():
    made = provenance("jaxmorph compare x.yaml", digest())
    for each in (made, replace(made, load_after=(1.0, 2.0, 3.0))):
        assert parse(Provenance, json.loads(json.dumps(asdict(each))), "") == each
    labels = [label for label, _ in made.rows()]
    assert labels[:4] == ["command", "configuration", "commit", "date"]
    assert "jax 0." in made.versions
    assert (made.command, len(made.load_before)) == ("jaxmorph compare x.yaml", 3)


def git(*words: str) -> None:
    name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *name, *words], check=True, capture_output=True)


@pytest.fixture
def _a_repository(tmp_path, monkeypatch):
    """A package's sources in a repository with one commit."""
    package = tmp_path / "jaxmorph"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(jaxmorph, "__file__", str(package / "__init__.py"))
    git("init")
    git("add", ".")
    git("commit", "-m", "a")


@pytest.mark.usefixtures("_a_repository")
def test_a_commit_says_if_files_were_changed(tmp_path):
    commit = provenance("x").commit
    assert len(commit) >= 7
    assert int(commit, 16) >= 0
    (tmp_path / "jaxmorph" / "__init__.py").write_text("changed = True\n")
    assert provenance("x").commit == f"{commit}-dirty"


@pytest.mark.usefixtures("_a_repository")
def test_an_installed_package_has_its_version(tmp_path, monkeypatch):
    # In somebody's repository, whose commit is not the package's.
    installed = tmp_path / "env" / "jaxmorph" / "__init__.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(jaxmorph, "__file__", str(installed))
    assert provenance("x").commit == f"jaxmorph {jaxmorph.__version__}"


# user nice system idle iowait irq softirq steal guest guest_nice
STAT = """\
cpu  1000 0 0 9999 0 0 0 0 0 0
cpu0 100 20 30 5000 400 1 2 3 50 0
cpu1 10 0 0 5000 0 0 0 0 0 0
cpu10 7 0 0 5000 0 0 0 0 0 0
intr 12 0 3
ctxt 4
"""


def test_a_processor_is_busy_unless_it_idles_or_waits_for_a_disk():
    assert busy_ticks(STAT, {0}) == 100 + 20 + 30 + 1 + 2 + 3
    assert busy_ticks(STAT, {1, 10}) == 10 + 7


@pytest.mark.parametrize(
    ("busy_s", "own_s", "share"),
    [(12.0, 4.0, 0.4), (4.0, 4.0, 0.0), (3.9, 4.0, 0.0)],  # ticks may be fewer than were used
)
def test_what_this_program_did_not_use_others_did(busy_s, own_s, share):
    before = ProcessorTimes(at_s=100.0, busy_s=50.0, own_s=7.0)
    after = ProcessorTimes(at_s=110.0, busy_s=50.0 + busy_s, own_s=7.0 + own_s)
    assert others_share(before, after, 2) == pytest.approx(share)


def test_what_is_not_counted_is_not_known():
    unknown, known = ProcessorTimes(0.0, None, 1.0), ProcessorTimes(9.0, 9.0, 9.0)
    assert others_share(unknown, known, 2) is None
    assert others_share(known, unknown, 2) is None
    assert others_share(known, known, 2) is None  # no time has passed


def test_times_only_grow():
    before = processor_times()
    sum(range(1_000_000))
    after = processor_times()
    assert after.at_s >= before.at_s
    assert after.own_s >= before.own_s
    assert (after.busy_s or 0.0) >= (before.busy_s or 0.0)
