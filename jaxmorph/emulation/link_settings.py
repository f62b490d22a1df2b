"""What a configuration says of links, as those who emulate them or carry messages are told it."""

import time
from collections.abc import Sequence

from jaxmorph.config import Config
from jaxmorph.emulation.configured_trace import trace_conditions
from jaxmorph.runtime.rendezvous import Rendezvous
from jaxmorph.transport.link_emulator import LinkCondition
from jaxmorph.transport.network_cards import listening_addresses
from jaxmorph.transport.plane import TransportSettings


def emulated_conditions(config: Config, restarts: int = 0) -> tuple[LinkCondition, ...]:
    """How a run's links are to behave: those that the configuration lists, and its trace's.

    Ranks that were started again after a failure meet no cut: they would use what is left.

    Args:
        restarts: How often its ranks have been started again.

    Raises:
        UserError: If the trace can't be read, or names a link that the pipeline doesn't have.
    """
    listed = [LinkCondition(**dict(link)) for link in config.emulation.links]
    trace, stages = config.emulation.trace, config.parallelism.stages
    found = (*listed, *trace_conditions(trace, stages, "emulation.trace"))
    return tuple(each for each in found if not (restarts and each.cut))


def untimed(conditions: Sequence[LinkCondition]) -> tuple[LinkCondition, ...]:
    """Those that hold before the time has begun that the others go by."""
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
