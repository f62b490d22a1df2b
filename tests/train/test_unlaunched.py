"""A script whose processes `jax.distributed.initialize` has joined: nothing else ends them."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from jaxmorph.runtime.started_rank import reserved_port

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(90)]

LIMIT_S = 60.0  # JAX alone would wait for longer than that

SCRIPT = """
import sys
import jax
rank, address = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, rank, [0], coordinator_bind_address=address)
import jaxmorph
from library_steps import CONFIG, batches, build_model
with jaxmorph.Trainer(build_model(), CONFIG) as trainer:
    for batch in batches():
        print("step", trainer.step(batch).step, flush=True)
        if trainer.rank == 1:
            sys.exit("no more data")
"""


def test_a_process_that_exits_ends_the_other(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text(64 * "s")
    secret.chmod(0o600)
    environment = {
        "JAXMORPH_SECRET_FILE": str(secret),
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    with ExitStack() as opened:
        address = f"127.0.0.1:{opened.enter_context(reserved_port())}"
        ranks = [
            opened.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", SCRIPT, str(rank), address],
                    env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
            )
            for rank in range(2)
        ]  # fmt: skip
        for rank in ranks:
            opened.callback(rank.kill)
        (_, lost), (printed, errors) = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    assert re.findall(r"^step \d+", printed, re.MULTILINE) == ["step 0"], errors
    assert errors.splitlines()[-1] == "no more data"
    assert "RendezvousError: rank 1 is gone" in lost
    assert [rank.returncode for rank in ranks] == [1, 1]
