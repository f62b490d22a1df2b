"""The routes of one rank's messages, opened together and closed together."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from jax.sharding import Mesh, NamedSharding

from jaxmorph.copies.backends import PayloadShape, SlotUse
from jaxmorph.copies.choosing import StageCopies, open_copies
from jaxmorph.program.instructions import Channel
from jaxmorph.records import Link
from jaxmorph.runtime.delegated import DelegatedRoute
from jaxmorph.runtime.direct import DirectRoute, LinkCommunicators
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.failover_route import FailoverRoute, PathWatch
from jaxmorph.runtime.link_connections import LinkLines
from jaxmorph.runtime.payloads import slot_use
from jaxmorph.runtime.queue import DeviceQueue
from jaxmorph.runtime.routes import Route
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.transport.plane import DataPlane

_HANGS_AFTER = 0.5  # of the time after which a direct transfer is given up

Payloads = Mapping[Channel, PayloadShape]


@dataclass(frozen=True)
class Site:
    """Where a rank's routes are."""

    rank: int
    mesh: Mesh
    placement: NamedSharding
    queue: DeviceQueue
    payloads: Payloads
    links: EmulatedLinks
    is_cut: Callable[[Link], bool]


@dataclass(frozen=True)
class StageRoutes:
    """A rank's routes.

    Attributes:
        delegated: By hosts; None where no link of the rank is ever delegated.
        failover: What completes direct transfers whose path fails; None: a failure ends the run.
        copies: Between the device and slots; None without a plane.
    """

    direct: DirectRoute
    delegated: DelegatedRoute | None = None
    failover: FailoverRoute | None = None
    copies: StageCopies | None = None

    @property
    def by_name(self) -> dict[str, Route]:
        """What the instructions of programs call them."""
        routes: dict[str, Route] = {"direct": self.failover or self.direct}
        return routes if self.delegated is None else {**routes, "delegated": self.delegated}

    def close(self) -> None:
        """Stop their threads, once the rank's queue has stopped."""
        for each in (self.failover, self.copies):
            if each is not None:
                each.close()


def open_routes(
    site: Site, settings: StageSettings, plane: DataPlane | None, lines: LinkLines | None
) -> StageRoutes:
    """Make a rank's routes; to be closed.

    Args:
        plane: What carries delegated transfers; None: no link of this rank is ever delegated.
        lines: To the other end of each of its links that fail over; None: none does.

    Raises:
        UserError: If payloads can't be copied as the configuration says.
    """
    communicators = _communicators(site, settings)
    direct = DirectRoute(
        communicators.first_programs(),
        answered=settings.pace is not None,
        links=site.links,
        timeout_s=_given_up_after_s(settings),
    )
    if plane is None:
        return StageRoutes(direct)
    with ExitStack() as opened:
        copies = open_copies(site.placement, plane.report_memory, settings.copies)
        opened.callback(copies.close)
        delegated = DelegatedRoute(
            plane,
            _slot_uses(site.payloads, settings),
            site.rank,
            site.placement,
            copies.outgoing,
            site.queue.raise_error,
            copies.incoming,
        )
        failover = None
        if lines is not None and lines.wires:
            failover = FailoverRoute(
                direct,
                delegated,
                lines.wires,
                site.rank,
                settings.transfer_timeout_s,
                communicators,
                _path_watch(site, settings, lines),
            )
        opened.pop_all()
    return StageRoutes(direct, delegated, failover, copies)


def _communicators(site: Site, settings: StageSettings) -> LinkCommunicators:
    payloads = {
        channel: payload
        for channel, payload in site.payloads.items()
        if settings.direct is None or channel.link in settings.direct
    }
    return LinkCommunicators(site.mesh, payloads, answered=settings.pace is not None)


def _path_watch(site: Site, settings: StageSettings, lines: LinkLines) -> PathWatch:
    hangs_s = _given_up_after_s(settings) * _HANGS_AFTER
    return PathWatch(lines.wires, lines.echoes, hangs_s, site.is_cut)


def _given_up_after_s(settings: StageSettings) -> float:
    return settings.direct_timeout_s or settings.transfer_timeout_s


def _slot_uses(payloads: Payloads, settings: StageSettings) -> dict[Channel, SlotUse]:
    """How the payloads of a rank's channels that may be delegated lie in slots."""
    return {
        channel: slot_use(channel, payload)
        for channel, payload in payloads.items()
        if channel.link in settings.delegated
    }
