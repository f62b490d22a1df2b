"""Lets these tests import the modules beside them, and share a run."""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def four_stages(tmp_path_factory, quick_environment):
    """The output of a run of 20 steps, and where it wrote; tests only read it."""
    from four_stages import run_whole  # now that it can be found

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    return run_whole(folder / "four_stages", quick_environment)
