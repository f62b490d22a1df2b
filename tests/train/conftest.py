"""Lets these tests share a run."""

import os

import pytest


@pytest.fixture(scope="session")
def four_stages(tmp_path_factory, quick_environment):
    """The output of a run of 20 steps, and where it wrote; tests only read it."""
    from four_stages import run_whole

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    return run_whole(folder / "four_stages", quick_environment)
