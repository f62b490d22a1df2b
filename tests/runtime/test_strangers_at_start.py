"""JAX's coordination service lets anyone in: a stranger there ends the ranks' start."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from jaxmorph.runtime.launcher import PlaceTakenError, run_ranks

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.long,
    pytest.mark.usefixtures("ranks_find_modules"),
]


def test_a_stranger_in_a_ranks_place_is_named(tmp_path):
    messages, is_in = [], tmp_path / "is_in"
    with ExitStack() as opened:

        def take(message):
            if not messages:
                stranger = subprocess.Popen(
                    [sys.executable, Path(__file__).parent / "stranger.py",
                     message["coordinator"], "1", is_in],
                    env=os.environ | {"JAX_PLATFORMS": "cpu"},
                    stderr=subprocess.DEVNULL,
                )  # fmt: skip
                opened.callback(stranger.wait)
                opened.callback(stranger.kill)
            messages.append(message)

        with pytest.raises(PlaceTakenError, match=r"^a process that isn't the run's .* as rank 1"):
            run_ranks("late_rank", [str(is_in)], 2, tmp_path / "logs", take, within_s=120)
    assert [each["kind"] for each in messages] == ["waits", "waits"]
