"""`docs/how-to/gpus.md` and its two jobs: flags that exist, and what the launchers read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxmorph.config import load_config
from jaxmorph.runtime.xla_settings import gpu_settings

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = DOCS / "examples"
PAGE = (DOCS / "how-to" / "gpus.md").read_text(encoding="utf-8")
CONFIG = "docs/examples/two_nodes.yaml"
SCRIPT = (EXAMPLES / "two_nodes.sbatch").read_text(encoding="utf-8")
OBJECTS = {
    each["kind"]: each
    for each in yaml.safe_load_all((EXAMPLES / "two_nodes_jobset.yaml").read_text(encoding="utf-8"))
}


def stages():
    return load_config(EXAMPLES / "two_nodes.yaml").parallelism.stages


def accepted(flags):
    """The output of a process with these XLA flags; an unknown flag ends it."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    code = "import jax; jax.devices(); print('accepted')"
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    ).stdout


@pytest.fixture(scope="module")
def flags():
    found = set(re.findall(r"`(--xla_\w+(?:=[\w.]*)?)`", PAGE + SCRIPT))
    assert len(found) > 3
    # A flag without a value takes any number; its effect is not tested.
    return sorted(flag if "=" in flag else f"{flag}=1" for flag in found)


def test_the_installed_jax_knows_every_xla_flag(flags):
    assert accepted(flags) == "accepted\n"


def test_the_page_lists_what_is_set():
    rows = re.findall(r"^\| `-*(\w+)` \|(?: `(\w+)`)? \| `(\w+)` \|", PAGE, re.MULTILINE)
    for column, fails_over in ((1, False), (2, True)):
        set_here = {each.name: each.value for each in gpu_settings(fails_over=fails_over)}
        assert {row[0]: row[column] for row in rows if row[column]} == set_here


def sbatch_options():
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", SCRIPT, re.MULTILINE))


def test_slurm_starts_a_task_for_each_stage():
    options = sbatch_options()
    assert int(options["nodes"]) * int(options["ntasks-per-node"]) == stages()
    assert options["gpus-per-node"] == options["ntasks-per-node"]
    assert not re.search(r"^[^#]*gpus-per-task", SCRIPT, re.MULTILINE)
    (started,) = re.findall(r"^srun (.*) jaxmorph train ", SCRIPT, re.MULTILINE)
    wanted = {"--distribution=block", "--cpu-bind=none", "--kill-on-bad-exit=1"}
    assert set(started.split()) == wanted
    assert f"jaxmorph train {CONFIG} --resume auto\n" in SCRIPT


def test_the_script_is_bash():
    checked = subprocess.run(["bash", "-n"], input=SCRIPT, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_only_the_link_between_nodes_is_delegated():
    per_node = int(sbatch_options()["ntasks-per-node"])
    routes = load_config(EXAMPLES / "two_nodes.yaml").routes.model_dump()
    delegated = [link for link, route in routes.items() if route == "delegated"]
    assert delegated == [f"{per_node - 1}-{per_node}"]


(REPLICATED,) = OBJECTS["JobSet"]["spec"]["replicatedJobs"]
JOB = REPLICATED["template"]["spec"]
POD = JOB["template"]["spec"]
(CONTAINER,) = POD["containers"]


def test_a_jobset_has_a_pod_and_gpu_for_each_stage():
    assert REPLICATED["replicas"] == 1
    assert JOB["completionMode"] == "Indexed"  # sets JOB_COMPLETION_INDEX
    assert JOB["completions"] == JOB["parallelism"] == stages()
    assert CONTAINER["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert (JOB["backoffLimit"], POD["restartPolicy"]) == (0, "Never")
    mounted = {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounted == {volume["name"] for volume in POD["volumes"]}


def test_pods_may_read_what_jax_needs_to_find_peers():
    account = POD["serviceAccountName"]
    assert OBJECTS["ServiceAccount"]["metadata"]["name"] == account
    binding = OBJECTS["RoleBinding"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert binding["roleRef"]["name"] == OBJECTS["Role"]["metadata"]["name"]
    readable = {name for rule in OBJECTS["Role"]["rules"] for name in rule["resources"]}
    assert readable >= {"pods", "services", "jobs"}


def test_the_pods_command_is_valid():
    command, verb, path, *overrides = CONTAINER["command"]
    assert (command, verb, path) == ("jaxmorph", "train", CONFIG)
    assert [overrides.pop(), overrides.pop()] == ["auto", "--resume"]
    routes = load_config(DOCS.parent / path, overrides).routes
    assert {routes.default, *routes.by_link.values()} == {"delegated"}
