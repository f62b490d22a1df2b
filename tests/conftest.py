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


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
    """Machine code of tiny stages runs a few times: most of its optimisation is not worth it.

    Optimisation of the programs themselves (fusion, loops, buffers) is left as it is. It holds for
    processes that tests start. A module whose processes shall compile as users' do has a fixture
    of this name that does nothing.
    """
    if "jax" in sys.modules:
        sys.modules["jax"].devices()  # this process has read its own flags by then
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        if HAS_OLDER_EMITTERS:
            patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {OLDER_EMITTERS}".strip())
        yield


@pytest.fixture(scope="module")
def compile_quickly_here():
    """The same, for programs that the tests' own process compiles while this lasts."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def pytest_sessionfinish(session, exitstatus):
    """Where tests of one kind were asked for, there may be none."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.option.markexpr:
        session.exitstatus = pytest.ExitCode.OK
