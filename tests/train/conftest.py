"""Lets these tests import the modules beside them, and share a run."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def four_stages(tmp_path_factory, quick_environment):
    """The output of a run of 20 steps, and where it wrote; tests only read it."""
    from four_stages import run_whole  # now that it can be found

    return run_whole(tmp_path_factory.mktemp("four"), quick_environment)
