"""What all tests share: examples that repeat, and how processes that tests start compile."""

import os
import sys
from importlib.metadata import version

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

# XLA's newer way to machine code takes three times as long; later versions have no other.
OLDER_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
HAS_OLDER_EMITTERS = version("jaxlib").startswith("0.10.")
USERS_FLAGS = os.environ.get("XLA_FLAGS", "")
QUICK_FLAGS = f"{USERS_FLAGS} {OLDER_EMITTERS}".strip() if HAS_OLDER_EMITTERS else USERS_FLAGS

os.environ["XLA_FLAGS"] = QUICK_FLAGS  # for this process, which reads them once


def pytest_collection_finish():
    """This process compiles quickly; those that tests start, as each module says."""
    if "jax" in sys.modules:
        jax = sys.modules["jax"]
        jax.devices()  # it has read its flags by then
        jax.config.update("jax_disable_most_optimizations", True)
    os.environ["XLA_FLAGS"] = USERS_FLAGS


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
    """Machine code of tiny stages runs a few times: most of its optimisation is not worth it.

    Optimisation of the programs themselves (fusion, loops, buffers) is left as it is. A module
    whose processes shall compile as users' do has a fixture of this name that does nothing.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        patch.setenv("XLA_FLAGS", QUICK_FLAGS)
        yield


def pytest_sessionfinish(session, exitstatus):
    """Where tests of one kind were asked for, there may be none."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.option.markexpr:
        session.exitstatus = pytest.ExitCode.OK
