"""Checksums of payloads, and which of them two ends use."""

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import TypeAlias
from zlib import crc32

Checksum: TypeAlias = Callable[..., int]
"""Of bytes-like data, and optionally the checksum of what came before them."""

NONE, CRC32, CRC32C = 1, 2, 3


def _none(data: bytes | memoryview, before: int = 0) -> int:
    return 0


def _known() -> dict[int, Checksum]:
    found: dict[int, Checksum] = {NONE: _none, CRC32: crc32}
    with contextlib.suppress(ImportError):
        found[CRC32C] = importlib.import_module("crc32c").crc32c
    return found


_KNOWN = _known()


def offered(wanted: bool = True) -> tuple[int, ...]:
    """The algorithms this end can do, best first; none at all but `NONE` if they aren't wanted."""
    return tuple(sorted(_KNOWN.keys() - {NONE}, reverse=True)) if wanted else (NONE,)


def chosen(peer_offers: Sequence[int], own_offers: Sequence[int]) -> int:
    """The first of the peer's algorithms that this end offers too; `NONE` if either end says so.

    Raises:
        ValueError: If the ends have none in common.
    """
    if NONE in peer_offers or NONE in own_offers:
        return NONE
    for number in peer_offers:
        if number in own_offers:
            return number
    raise ValueError(f"the peer can do checksums {list(peer_offers)}, expected {list(own_offers)}")


def algorithm(number: int) -> Checksum:
    """The function of a number from `offered`."""
    return _KNOWN[number]
