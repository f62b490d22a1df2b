"""What a rank sets before JAX starts, and its error where JAX has no device."""

import os
import socket

import jax
import pytest

from jaxmorph.errors import UserError
from jaxmorph.runtime import join
from jaxmorph.runtime.join import Joining, await_coordinator, join_run, own_devices
from jaxmorph.runtime.rank_process import RankArguments
from jaxmorph.runtime.rendezvous import SoleRank


@pytest.fixture
def begun(monkeypatch):
    """What JAX is started with: its arguments, and the flags at that time."""
    before, begun = jax.config.values["jax_cpu_collectives_implementation"], []

    def initialize(*_, **given):
        begun.append(given | {"flags": os.environ["XLA_FLAGS"].split()})

    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")  # or joining sets it
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(join, "rendezvous_of_joined", lambda *_: SoleRank())
    yield begun
    jax.config.update("jax_cpu_collectives_implementation", before)


@pytest.fixture
def flags_of(monkeypatch, begun):
    """Joins a run of two ranks with a user's flags; returns the flags that JAX starts with."""

    def joined(of_user):
        monkeypatch.setenv("XLA_FLAGS", of_user)
        launched = RankArguments(0, 2, "host:1", messages_fd=-1, lifeline_fd=-1)
        join_run(launched, Joining(1, 7))
        return begun[0]["flags"]

    return joined


def test_transfers_have_a_deadline_and_ranks_compile_alone(flags_of):
    assert {
        "--xla_cpu_collective_timeout_seconds=7",
        "--xla_gpu_shard_autotuning=false",
    } <= set(flags_of(""))


@pytest.mark.parametrize(
    ("rank", "known_as", "of_user", "bound"),
    [
        (0, "10.0.0.1", None, "10.0.0.1:61447"),
        (0, "", None, None),  # then JAX listens on all interfaces
        (0, "10.0.0.1", "10.9.9.9:1", None),  # JAX reads it itself
        (1, "10.0.0.1", None, None),
    ],
)
def test_a_jobs_coordinator_listens_on_the_ranks_network(
    monkeypatch, begun, rank, known_as, of_user, bound
):
    task = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0",
    }  # fmt: skip
    for name, value in task.items():
        monkeypatch.setenv(name, value)
    if of_user:
        monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", of_user)
    asked = []
    monkeypatch.setattr(join, "address_of_name", lambda host: asked.append(host) or known_as)
    join_run(None, Joining(1, 7))
    assert begun[0]["coordinator_bind_address"] == bound
    assert asked == (["node1"] if rank == 0 and not of_user else [])


@pytest.fixture
def fails(monkeypatch):
    """Makes JAX fail to find devices."""

    def fails(error):
        def local_devices():
            raise error

        monkeypatch.setattr(jax, "local_devices", local_devices)

    return fails


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AssertionError(), "it has no such platform installed"),
        (RuntimeError("Unable to initialize backend 'cuda':\nno GPU"), "backend 'cuda': no GPU"),
    ],
)
def test_a_missing_platform_is_named(fails, error, reason):
    fails(error)
    with pytest.raises(UserError) as raised:
        own_devices()
    message = str(raised.value)
    asked = jax.config.values["jax_platforms"]
    assert message.startswith(f"JAX_PLATFORMS: got {asked!r}, for which")
    assert reason in message
    assert "\n" not in message


def test_other_errors_are_raised_unchanged(fails):
    fails(RuntimeError("DEADLINE_EXCEEDED: rank 1 did not come"))
    with pytest.raises(RuntimeError, match="rank 1 did not come"):
        own_devices()


def test_a_rank_begins_as_soon_as_rank_0_serves(monkeypatch):
    """Rank 0 begins to serve while the rank waits after a refused connection."""
    waits_s, rank_0 = [], socket.socket()
    rank_0.bind(("127.0.0.1", 0))

    def sleep(time_s):
        waits_s.append(time_s)
        rank_0.listen()

    monkeypatch.setattr(join.time, "sleep", sleep)
    with rank_0:
        left_s = await_coordinator(f"127.0.0.1:{rank_0.getsockname()[1]}", 60.0)
        assert 0 < left_s <= 60.0
        assert len(waits_s) == 1
        rank_0.accept()[0].close()


def test_a_rank_0_that_never_serves_is_left_to_jax_to_report():
    with socket.socket() as rank_0:
        rank_0.bind(("127.0.0.1", 0))
        assert await_coordinator(f"127.0.0.1:{rank_0.getsockname()[1]}", 0.1) == 0.0
