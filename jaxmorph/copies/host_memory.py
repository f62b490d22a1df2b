"""Where stages keep their arrays in the host's own memory, as on CPUs: what that spares."""

import jax
import numpy as np
from jax.sharding import Sharding


def is_on_host(placement: Sharding) -> bool:
    """Whether arrays kept so lie in memory that this process reads, each of them whole."""
    first, *others = placement.device_set
    return not others and first.platform == "cpu"


def for_program(values: np.ndarray, placement: Sharding) -> jax.Array | np.ndarray:
    """What a compiled program is to be given for values of the host.

    Args:
        values: Nobody may write to them any more.
        placement: Where the program wants its arguments.

    Returns:
        The values on their device; on CPUs as they are. There a call that takes them over costs
        about 40 us, and one after placing them 230 (float32 [1, 32, 64], JAX 0.10.2).
    """
    return values if is_on_host(placement) else jax.device_put(values, placement)
