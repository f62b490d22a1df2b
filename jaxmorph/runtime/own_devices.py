"""The devices of this process, or in one line why JAX has none."""

from typing import Any

import jax

from jaxmorph.errors import UserError


def own_devices() -> list[Any]:
    """What JAX computes on in this process; it looks for devices now, if it hasn't yet.

    Raises:
        UserError: If it has none of those that `JAX_PLATFORMS` names.
    """
    try:
        return jax.local_devices()
    except AssertionError as error:  # what JAX raises where it knows none of the platforms
        raise _none_of_these("it has no such platform installed") from error
    except RuntimeError as error:
        if "Unable to initialize backend" not in str(error):
            raise  # of ranks that didn't come, for one
        raise _none_of_these(" ".join(str(error).split())) from error


def device_kind() -> str:
    """What the first of them is, such as "NVIDIA H800", or "cpu"."""
    return own_devices()[0].device_kind


def _none_of_these(reason: str) -> UserError:
    asked = jax.config.values["jax_platforms"]
    return UserError(
        f"JAX_PLATFORMS: got {asked!r}, of which JAX has no device here ({reason}), expected a "
        "platform that it has (of GPUs, rank k of a host takes the k-th: it needs as many as there "
        "are ranks); jaxmorph doctor says what this machine has"
    )
