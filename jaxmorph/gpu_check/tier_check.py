"""All that is found out about one way of copying in one direction, step by step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from jaxmorph.copies.payload import PayloadShape
from jaxmorph.copies.programs import CopyTier, LandingTier
from jaxmorph.copies.trial import try_landing, try_tier
from jaxmorph.copies.ways import AbsentTier
from jaxmorph.gpu_check.bare_copies import bare_copies
from jaxmorph.gpu_check.copy_settings import CopySettings
from jaxmorph.gpu_check.copy_times import measure_latency, measure_speed
from jaxmorph.gpu_check.disturbance import NUM_SLOTS, measure_disturbance
from jaxmorph.gpu_check.lone_end import FIRST_OF_ALL, Site
from jaxmorph.gpu_check.lone_receiver import LoneReceiver
from jaxmorph.gpu_check.lone_sender import LoneSender
from jaxmorph.gpu_check.messages import IncomingMessages, Messages, OutgoingMessages
from jaxmorph.gpu_check.traffic import IncomingTraffic, OutgoingTraffic, Traffic
from jaxmorph.gpu_check.whole_payloads import look_at_payloads
from jaxmorph.pallas_kernels import NoKernelsError

OUTGOING, INCOMING = "outgoing", "incoming"

_NOT_FOR_THIS = (ImportError, NoKernelsError)
"""What a tier raises that is not for this machine; anything else went wrong."""


class OutgoingTier:
    """A tier that copies into slots."""

    direction = OUTGOING

    def __init__(self, tier: CopyTier, site: Site) -> None:
        self.tier, self.site = tier, site

    def try_it(self) -> None:
        """Raise why it doesn't work, as when a rank starts."""
        try_tier(self.tier, self.site.placement, self.site.memory)

    @contextmanager
    def messages(
        self, *, slot_bytes: int, num_slots: int, first: int = FIRST_OF_ALL
    ) -> Iterator[Messages]:
        """Messages to be looked at; see `OpenMessages`."""
        with LoneSender(self.tier, self.site, slot_bytes, num_slots, first) as sender:
            yield OutgoingMessages(sender)

    @contextmanager
    def traffic(self, payload: PayloadShape) -> Iterator[Traffic]:
        """Messages beside computation; see `OpenTraffic`."""
        with LoneSender(self.tier, self.site, _bytes(payload), NUM_SLOTS) as sender:
            yield OutgoingTraffic(sender, payload)


class IncomingTier:
    """A tier that copies out of slots."""

    direction = INCOMING

    def __init__(self, tier: LandingTier, site: Site) -> None:
        self.tier, self.site = tier, site

    def try_it(self) -> None:
        """Raise why it doesn't work, as when a rank starts."""
        try_landing(self.tier, self.site.placement, self.site.memory)

    @contextmanager
    def messages(
        self, *, slot_bytes: int, num_slots: int, first: int = FIRST_OF_ALL
    ) -> Iterator[Messages]:
        """Messages to be looked at; see `OpenMessages`."""
        with LoneReceiver(self.tier, self.site, slot_bytes, num_slots, first) as receiver:
            yield IncomingMessages(receiver)

    @contextmanager
    def traffic(self, payload: PayloadShape) -> Iterator[Traffic]:
        """Messages beside computation; see `OpenTraffic`."""
        with LoneReceiver(self.tier, self.site, _bytes(payload), NUM_SLOTS) as receiver:
            yield IncomingTraffic(receiver, payload)


def _bytes(payload: PayloadShape) -> int:
    (size,) = payload.shape
    return size * payload.dtype.itemsize


def check_tier(
    looked_at: OutgoingTier | IncomingTier, settings: CopySettings
) -> Iterator[tuple[str, Any]]:
    """What is found out about a tier, each thing as soon as it is.

    Yields:
        (which field of `TierFound`, what it is in JSON's types).

    Raises:
        Exception: Whatever goes wrong once its trial has been passed.
    """
    placement = looked_at.site.placement
    try:
        looked_at.try_it()
    except Exception as error:
        absent = isinstance(looked_at.tier, AbsentTier) or isinstance(error, _NOT_FOR_THIS)
        yield ("absent" if absent else "trouble"), " ".join(repr(error).split())
        return
    open_messages = looked_at.messages
    yield "wholeness", asdict(look_at_payloads(open_messages, placement, settings))
    yield "latency", asdict(measure_latency(open_messages, placement, settings))
    (device,) = placement.device_set
    with bare_copies(device, outgoing=looked_at.direction == OUTGOING) as bare:
        speeds = measure_speed(open_messages, looked_at.traffic, placement, bare, settings)
    yield "speeds", [asdict(speed) for speed in speeds]
    disturbance = measure_disturbance(looked_at.traffic, placement, settings.matmuls)
    yield "disturbance", asdict(disturbance)
