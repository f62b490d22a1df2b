"""What a rank tells XLA before JAX begins."""

import os

import jax
import pytest

from jaxmorph.runtime import join
from jaxmorph.runtime.join import join_run
from jaxmorph.runtime.rendezvous import SoleRank


@pytest.fixture
def flags_of(monkeypatch):
    """Joins a run of two with a user's flags; gives the flags that JAX begins with."""
    before = jax.config.values["jax_cpu_collectives_implementation"]

    def joined(of_user):
        begun = []
        monkeypatch.setenv("XLA_FLAGS", of_user)
        initialize = lambda *_, **__: begun.append(os.environ["XLA_FLAGS"])  # noqa: E731
        monkeypatch.setattr(jax.distributed, "initialize", initialize)
        monkeypatch.setattr(join, "rendezvous_of_joined", lambda timeout_s: SoleRank())
        join_run(start_timeout_s=1, step_timeout_s=7, coordinator="host:1", num_ranks=2, rank=0)
        (found,) = begun
        return found.split()

    yield joined
    jax.config.update("jax_cpu_collectives_implementation", before)


def test_a_transfer_has_a_deadline_and_no_rank_waits_for_another_to_compile(flags_of):
    assert set(flags_of("")) == {
        "--xla_cpu_collective_timeout_seconds=7",
        "--xla_gpu_shard_autotuning=false",
    }


def test_what_the_user_says_of_compiling_stands(flags_of):
    of_user = "--xla_gpu_shard_autotuning=true"
    told = [flag for flag in flags_of(of_user) if flag.startswith("--xla_gpu_shard_autotuning")]
    assert told[-1] == of_user  # of two the last counts
