"""How processes find one another by a folder alone, where JAX hasn't joined them."""

import time
from pathlib import Path

_PAUSE_S = 0.01


class FolderStore:
    """A `KeyValueStore` of processes on one machine.

    Args:
        folder: One that they share, and nobody else reads.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def key_value_set(self, key: str, value: str) -> None:
        """Store a value once under a new key."""
        path = self._path(key)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(value, encoding="utf-8")
        unfinished.rename(path)  # so that who finds it finds all of it

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a key.

        Raises:
            TimeoutError: If nobody has set it by then.
        """
        path, until_s = self._path(key), time.monotonic() + timeout_in_ms / 1e3
        while not path.exists():
            if time.monotonic() >= until_s:
                raise TimeoutError(f"nobody has set {key} within {timeout_in_ms / 1e3:g} s")
            time.sleep(_PAUSE_S)
        return path.read_text(encoding="utf-8")

    def _path(self, key: str) -> Path:
        return self._folder / f"{key.replace('/', '-')}.value"
