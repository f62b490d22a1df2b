"""How processes that tests start compile."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
    """Machine code of tiny stages runs a few times: most of its optimisation is not worth it.

    Optimisation of the programs themselves (fusion, loops, buffers) is left as it is. A module
    whose processes shall compile as users' do has a fixture of this name that does nothing.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield
