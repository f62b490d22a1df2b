"""The one private import of the runtime: the client of JAX's coordination service.

`jax.distributed` starts a key-value store on the host network for every multi-process run, with
blocking reads and deadlines, but has no public handle to it; `multihost_utils` would send the same
data over the accelerator's collectives, which must not carry control messages (a slow link would
hold them up, a dead one for ever). Everything else goes through `rendezvous.py`.
"""

from typing import Protocol, cast

from jax._src import distributed


class KeyValueStore(Protocol):
    """The part of the coordination service's client that is used."""

    def key_value_set(self, key: str, value: str) -> None:
        """Store a value once under a new key."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a key; a deadline that passes raises `jax.errors.JaxRuntimeError`."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Forget a key and, where it ends in a slash, all keys below it."""
        ...


def key_value_store() -> KeyValueStore:
    """The store of the run that this process has joined.

    Raises:
        RuntimeError: If `jax.distributed.initialize` has not been called.
    """
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("the coordination service is not running: no jax.distributed.initialize")
    return cast(KeyValueStore, client)
