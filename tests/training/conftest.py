"""Begins the simulated runs that these tests share."""

import pytest


@pytest.fixture
def begin_run():
    """Begins runs that adapt, as `adapting_run.Run` does, and ends them with the test."""
    from adapting_run import Run

    runs = []

    def begin(*args, **kwargs):
        runs.append(Run(*args, **kwargs))
        return runs[-1]

    yield begin
    for run in runs:
        run.plans.may_answer.set()
        run.loop.close()


@pytest.fixture
def run(begin_run):
    """A run that adapts, with plans made in this process."""
    from adapting_run import PlansHere

    return begin_run(PlansHere())
