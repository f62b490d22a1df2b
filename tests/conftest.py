"""What all tests share: examples that repeat, and how processes that tests start compile."""

import gc
import os
import shutil
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

# Modules that the tests of one folder share, or all tests.
HERE = Path(__file__).parent
FOLDERS = ("checkpoints", "control", "runtime", "train", "training", "transport")
sys.path += [str(HERE), *(str(HERE / folder) for folder in FOLDERS)]

# `make test` draws few examples of each property, `make test-more` many, the same ones each time.
for profile, examples in (("quick", 25), ("thorough", 100)):
    settings.register_profile(
        profile, max_examples=examples, derandomize=True, deadline=None, database=None
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Tests read no program that a user's runs have kept; workers share one folder.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not IS_WORKER:
    os.environ["JAXMORPH_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxmorph-tests-")

# XLA's newer way to machine code takes three times as long; later versions have no other. What it
# cuts into parts, to compile them side by side, takes twice as long where it is small.
WHOLE = "--xla_cpu_parallel_codegen_split_count=1"
OLDER_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
HAS_OLDER_EMITTERS = version("jaxlib").startswith("0.10.")
USERS_FLAGS = os.environ.get("XLA_FLAGS", "")
ADDED_FLAGS = f"{WHOLE} {OLDER_EMITTERS}" if HAS_OLDER_EMITTERS else WHOLE
QUICK_FLAGS = f"{USERS_FLAGS} {ADDED_FLAGS}".strip()

# For this process, which reads them once. A stage may have several devices.
os.environ["XLA_FLAGS"] = f"{QUICK_FLAGS} --xla_force_host_platform_device_count=4"


def pytest_collection_modifyitems(items):
    """The Makefile finds files whose tests start ranks by what is written in them."""
    for item in items:
        for name in ("multiprocess", "netns"):
            if item.get_closest_marker(name) and f"mark.{name}" not in _text_of(item.path):
                raise pytest.UsageError(f"{item.path}: expected the text 'mark.{name}' in it")


@cache
def _text_of(path):
    return path.read_text()


def pytest_collection_finish():
    """This process compiles quickly; those that tests start, as each module says."""
    if "jax" in sys.modules:
        jax = sys.modules["jax"]
        jax.devices()  # it has read its flags by then
        jax.config.update("jax_disable_most_optimizations", True)
    os.environ["XLA_FLAGS"] = USERS_FLAGS
    # What is imported by now stays: looking through it for garbage takes a seventh of all time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(scope="session")
def quick_environment():
    """What has processes compile quickly, for those that modules share."""
    return {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": QUICK_FLAGS}


@pytest.fixture(scope="module", autouse=True)
def compile_quickly(quick_environment):
    """Machine code of tiny stages runs a few times: most of its optimisation is not worth it.

    Optimisation of the programs themselves (fusion, loops, buffers) is left as it is. A module
    whose processes shall compile as users' do has a fixture of this name that does nothing.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in quick_environment.items():
            patch.setenv(name, value)
        yield


def pytest_sessionfinish(session, exitstatus):
    """Where tests of one kind were asked for, there may be none."""
    if not IS_WORKER:
        shutil.rmtree(os.environ["JAXMORPH_CACHE_DIR"], ignore_errors=True)
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.option.markexpr:
        session.exitstatus = pytest.ExitCode.OK
