"""What a configuration says of links, as those who emulate them or carry messages are told it."""

import time
from collections.abc import Sequence

from jaxmorph.config import Config
from jaxmorph.config.link_problems import possible_links
from jaxmorph.errors import UserError
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.schedule.costs import Link
from jaxmorph.transport.link_emulator import LinkCondition
from jaxmorph.transport.link_trace import read_link_trace
from jaxmorph.transport.network_cards import listening_addresses
from jaxmorph.transport.plane import TransportSettings


def emulated_conditions(config: Config) -> tuple[LinkCondition, ...]:
    """How a run's links are to behave: those that the configuration lists, and its trace's.

    Args:
        config: The run.

    Raises:
        UserError: If the trace can't be read, or names a link that the pipeline doesn't have.
    """
    listed = [LinkCondition(**dict(link)) for link in config.emulation.links]
    return (*listed, *_trace_conditions(config))


def untimed(conditions: Sequence[LinkCondition]) -> tuple[LinkCondition, ...]:
    """Those that hold before the time has begun that the others go by.

    Args:
        conditions: Any.
    """
    return tuple(each for each in conditions if each.from_s is None and each.to_s is None)


def agree_on_origin_s(rendezvous: Rendezvous) -> float:
    """A time from which all ranks count, by the clock of the machine that they share.

    Args:
        rendezvous: The meeting place of all ranks; they all call this at the same point.
    """
    return rendezvous.exchange({"now_s": time.monotonic()})[0]["now_s"]


def transport_settings(
    config: Config, *, one_loopback: bool, coordinator_host: str
) -> TransportSettings:
    """How this host's end of the data plane travels.

    Args:
        config: The run.
        one_loopback: Whether all ranks share this machine's loopback.
        coordinator_host: Where the run's first rank is.
    """
    transport = config.transport
    configured = None if transport.addresses == "auto" else transport.addresses
    return TransportSettings(
        addresses=listening_addresses(
            configured, one_loopback=one_loopback, coordinator_host=coordinator_host
        ),
        lanes=None if transport.lanes == "auto" else transport.lanes,
        chunk_bytes=transport.chunk_bytes,
        checksum=transport.checksum,
        backend=transport.backend,
    )


def _trace_conditions(config: Config) -> list[LinkCondition]:
    path = config.emulation.trace
    if path is None:
        return []
    try:
        found = read_link_trace(path)
    except UserError as error:
        raise UserError(f"emulation.trace: {error}") from error
    links = possible_links(config.parallelism.stages)
    unknown = {Link(*each.between) for each in found}.difference(links)
    if unknown:
        expected = f"one of {', '.join(map(str, links))}" if links else "no links, for one stage"
        raise UserError(f"emulation.trace: {path}: got link {min(unknown)}, expected {expected}")
    return found
