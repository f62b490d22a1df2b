"""The section of a configuration that says how the host-side data plane travels."""

from ipaddress import IPv4Network, ip_address
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from jaxmorph.config.sections import Expected, Section

_MOST_LANES = 64
_LEAST_CHUNK_BYTES, _MOST_CHUNK_BYTES = 4096, 16 * 2**20  # what a frame may announce


def _checked_address(text: str) -> str:
    return str(IPv4Network(text, strict=False) if "/" in text else ip_address(text))


class Transport(Section):
    """How delegated transfers travel from host to host.

    Addresses are this host's own, one for each network card; a subnet stands for those that a host
    has in it, so that one file does for all hosts. `auto` is 127.0.0.1 where all ranks share one
    loopback, and else those of the cards that are found. `lanes` is the number of
    connections to each peer; `auto` follows what messages turn out to need. Each chunk is
    acknowledged, and sent again where need be, as a whole. `copies` is how payloads get from the
    device into the slots that the transfers leave from; `auto` is the first way that works. Who
    names `pallas` has that tried first for the way back to the device too.
    """

    addresses: Annotated[
        Literal["auto"]
        | Annotated[
            tuple[Annotated[str, AfterValidator(_checked_address)], ...],
            Field(strict=False, min_length=1),
        ],
        Expected(
            "auto, or a list of IP addresses, one for each of this host's network cards, or of "
            "IPv4 subnets that they are in"
        ),
    ] = "auto"
    lanes: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=1, le=_MOST_LANES)],
        Expected(f"auto, or a whole number from 1 to {_MOST_LANES}"),
    ] = "auto"
    chunk_bytes: Annotated[
        int,
        Field(ge=_LEAST_CHUNK_BYTES, le=_MOST_CHUNK_BYTES),
        Expected(f"a whole number from {_LEAST_CHUNK_BYTES} to {_MOST_CHUNK_BYTES}"),
    ] = 512 * 1024
    checksum: Annotated[bool, Expected("true or false")] = True
    backend: Literal["tcp", "nixl"] = "tcp"
    copies: Literal[
        "auto", "copy_engine", "pallas", "buffer_callback", "pinned_host", "io_callback"
    ] = "auto"
