"""The programs of a rank's direct links, each over a tuple of devices that its life has."""

from collections import Counter
from collections.abc import Mapping

from jax.sharding import Mesh

from jaxmorph.copies.payload import PayloadShape
from jaxmorph.program.instructions import Channel
from jaxmorph.runtime.links import LinkProgram
from jaxmorph.schedule.costs import Link
from jaxmorph.stage.mesh import link_mesh

LIVES = 2
"""How often a direct link can begin: once over its devices in either order."""


class LinkExhaustedError(RuntimeError):
    """A direct link has failed as often as it can begin in the life of its processes."""


def direct_programs(
    payloads: Mapping[Channel, PayloadShape],
    mesh: Mesh,
    *,
    answered: bool,
    failures: Mapping[Link, int] | None = None,
) -> dict[Channel, LinkProgram]:
    """What moves the payloads of a rank's direct links.

    A communicator whose transfer has failed stays closed, and XLA has one for each tuple of
    devices: after a failure the link's devices are taken in the other order.

    Args:
        payloads: What a message of each channel carries.
        answered: Whether the sender learns when its peer has come.
        failures: How often each link has failed; a link that isn't named hasn't.

    Returns:
        A compiled program for each channel.

    Raises:
        LinkExhaustedError: If a link has failed before with either order.
    """
    failed = Counter(failures or {})
    return {
        channel: _program(channel, payload, mesh, answered, failed[channel.link])
        for channel, payload in payloads.items()
    }


def _program(
    channel: Channel, payload: PayloadShape, mesh: Mesh, answered: bool, failures: int
) -> LinkProgram:
    lower, upper = channel.link
    orders = ((lower, upper), (upper, lower))
    if failures >= LIVES:
        raise LinkExhaustedError(
            f"link {channel.link} has failed {failures} times, and a direct link can begin "
            f"{LIVES} times: delegate it, or start its processes again"
        )
    order = orders[failures]
    source = order.index(channel.source)
    return LinkProgram(link_mesh(mesh, *order), payload, source=source, answered=answered)
