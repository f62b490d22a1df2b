"""How these tests start ranks that run the modules beside them."""

import os
import sys
from pathlib import Path

import pytest

from jaxmorph.runtime.launcher import run_ranks

HERE = Path(__file__).parent

if str(HERE) not in sys.path:  # `two_ends` lies beside these tests
    sys.path.append(str(HERE))


@pytest.fixture(scope="module")
def ranks_find_modules():
    """While this lasts, processes that are started can import the modules beside these tests."""
    with pytest.MonkeyPatch.context() as patch:
        path = f"{HERE}:{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
        patch.setenv("PYTHONPATH", path)
        yield


@pytest.fixture(scope="module")
def told_by_ranks(ranks_find_modules, tmp_path_factory):
    """Runs a module as so many ranks and returns all that they told."""

    def told_by_ranks(module, num_ranks, **options):
        told = []
        logs = tmp_path_factory.mktemp("logs")
        run_ranks(module, [], num_ranks, logs, told.append, **options)
        assert {message["rank"] for message in told} == set(range(num_ranks))
        return told

    return told_by_ranks
