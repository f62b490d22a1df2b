"""Connects to JAX's coordination service as a rank of a run, as any process that reaches it can.

Arguments: the service's address, the number of the rank, and a file to make once it is in.
"""

import sys
import time
from pathlib import Path

from jax._src.lib import _jax  # pyright: ignore  # `jax.distributed.initialize` calls it

client = _jax.get_distributed_runtime_client(sys.argv[1], int(sys.argv[2]), init_timeout=30)
try:
    client.connect()
finally:
    Path(sys.argv[3]).touch()
time.sleep(60)
