"""Starts ranks that run the modules beside these tests."""

import os
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from jaxmorph.runtime.launcher import run_ranks

HERE = Path(__file__).parent


@pytest.fixture
def make_ends():
    """Makes both ends of a link in this process, and closes them."""
    from two_ends import TwoEnds

    with ExitStack() as made:
        yield lambda *collectives, **settings: made.enter_context(
            closing(TwoEnds(*collectives, **settings))
        )


@pytest.fixture(scope="module")
def ranks_find_modules():
    """Lets ranks import the modules beside these tests."""
    with pytest.MonkeyPatch.context() as patch:
        path = f"{HERE}:{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
        patch.setenv("PYTHONPATH", path)
        yield


@pytest.fixture(scope="module")
def run_as_ranks(ranks_find_modules, tmp_path_factory):
    """Runs a module as so many ranks and returns all messages that they sent."""

    def run_as_ranks(module, num_ranks, arguments=(), **options):
        messages = []
        logs = tmp_path_factory.mktemp("logs")
        run_ranks(module, arguments, num_ranks, logs, messages.append, **options)
        assert {message["rank"] for message in messages} == set(range(num_ranks))
        return messages

    return run_as_ranks
