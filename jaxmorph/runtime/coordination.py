"""The one private import of the runtime: JAX's coordination service.

`jax.distributed` starts a key-value store on the host network for every multi-process run, but has
no public handle to it; `multihost_utils` would send the same data over the accelerator's
collectives, which must not carry control messages (a slow link would hold them up, a dead one for
ever). It is used once, to tell every rank where rank 0 listens: see `rendezvous.py`.
"""

from typing import Protocol

from jax._src import distributed


class KeyValueStore(Protocol):
    """The part of the coordination service that is used."""

    def key_value_set(self, key: str, value: str) -> None:
        """Store a value once under a new key."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a key; a deadline that passes raises `jax.errors.JaxRuntimeError`."""
        ...


def key_value_store() -> KeyValueStore:
    """The store of the run that this process has joined.

    Raises:
        RuntimeError: If `jax.distributed.initialize` has not been called.
    """
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("the coordination service is not running: no jax.distributed.initialize")
    return client


def coordinator_host() -> str:
    """The host, name or address, on which rank 0 serves the coordination service."""
    address = distributed.global_state.coordinator_address
    if address is None:
        raise RuntimeError("the coordination service is not running: no jax.distributed.initialize")
    return address.rpartition(":")[0].strip("[]")
