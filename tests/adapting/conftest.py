"""Lets these tests import the module beside them, and begins the simulated run that they share."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def run():
    """A run that adapts, with plans made in this process."""
    from adapting_run import PlansHere, Run  # where the line above has it looked for

    made = Run(PlansHere())
    yield made
    made.plans.may_answer.set()
    made.loop.close()
