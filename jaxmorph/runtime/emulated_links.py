"""Emulated conditions of a rank's links, for all routes; they may change while it runs."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, inf

from jaxmorph.control.link_state import directions_of
from jaxmorph.emulation.link_conditions import LinkCondition, of_route
from jaxmorph.program.instructions import Transfer
from jaxmorph.records import Link
from jaxmorph.runtime.rendezvous import Rendezvous, agree
from jaxmorph.runtime.routes import TransferIdentity
from jaxmorph.transport.link_emulator import LinkEmulator, by_direction
from jaxmorph.transport.plane import DataPlane


class EmulatedLinks:
    """What is emulated on this rank's links, set in one place for all routes.

    Both ends of a direct transfer compute its delay here. From the same conditions and times they
    get the same result, so they exchange nothing. The data plane gets the same conditions and
    delays delegated transfers itself, except their copies from host memory, which the receiving
    rank delays. Without conditions nothing is delayed.

    Queue thread: `wait_until_whole`, `over_s`, `on_link_s`, `concern`. Training thread: `join`,
    `emulate`. Any thread: `is_cut`, `look_again`, `received_s`. Lock (`_changed`): the emulators'
    state, and their replacement.

    Args:
        always: Conditions that hold beside those of each `emulate`.

    Attributes:
        peer_has_left: Whether a link's peer has left its path: then a transfer fails at once, and
            doesn't wait for a cut to heal.
    """

    def __init__(self, always: Sequence[LinkCondition] = ()) -> None:
        self._always = tuple(always)
        self._emulator = LinkEmulator(of_route(always, "direct"))
        self._arrivals = LinkEmulator(of_route(always, "delegated"))
        self._planes: list[DataPlane] = []
        self.peer_has_left: Callable[[Link], bool] = lambda link: False
        self._changed = threading.Condition()

    def concern(self, transfer: Transfer) -> bool:
        """Whether anything is emulated, at any time, on a transfer's direction."""
        return self._emulator.concerns(transfer.source, transfer.destination)

    def join(self, plane: DataPlane) -> None:
        """Pass conditions to a data plane too, from the next change on."""
        self._planes.append(plane)

    def emulate(self, conditions: Sequence[LinkCondition], origin_s: float | None = None) -> None:
        """Replace the emulated conditions.

        Args:
            conditions: Of all links; those of other ranks' links are ignored.
            origin_s: Time zero of the conditions, the same on all ranks; None: now.
        """
        origin_s = time.monotonic() if origin_s is None else origin_s
        both = (*self._always, *conditions)
        direct, delegated = of_route(both, "direct"), of_route(both, "delegated")
        with self._changed:
            self._emulator = LinkEmulator(direct, origin_s)
            self._arrivals = LinkEmulator(delegated, origin_s)
            self._changed.notify_all()
        for plane in self._planes:
            plane.emulate(delegated, origin_s)

    def is_cut(self, link: Link, step: int) -> bool:
        """Whether a link is cut now for direct messages of a step, in any direction."""
        now_s, both = time.monotonic(), directions_of(link)
        return any(self._emulator.is_cut(*direction, step, now_s) for direction in both)

    def look_again(self) -> None:
        """Make all waits for a cut link check `peer_has_left` again."""
        with self._changed:
            self._changed.notify_all()

    def wait_until_whole(
        self, identity: TransferIdentity, arrived_s: float, deadline_s: float
    ) -> float:
        """Wait while a transfer's link is cut; returns when the transfer can begin.

        Args:
            arrived_s: When this end came to it, by the monotonic clock; returned if nothing is cut.

        Raises:
            TimeoutError: If the link is still cut at the deadline, or once the peer has left.
        """
        if not self.concern(identity.transfer):
            return arrived_s
        began_s = time.monotonic()
        with self._changed:
            while (healed_s := self._healed_s(identity, arrived_s)) > max(
                arrived_s, time.monotonic()
            ):
                emulator = self._emulator
                remaining_s = min(healed_s, deadline_s) - time.monotonic()
                is_late = healed_s > deadline_s and remaining_s <= 0
                if is_late or self.peer_has_left(identity.transfer.link):
                    raise _cut_error(identity, time.monotonic() - began_s)
                self._changed.wait(min(remaining_s, threading.TIMEOUT_MAX))
                if emulator is not self._emulator:  # the new conditions hold from now on
                    arrived_s = max(arrived_s, time.monotonic())
        return healed_s

    def over_s(
        self, identity: TransferIdentity, num_bytes: int, met_s: float, deadline_s: float
    ) -> float:
        """When a transfer whose ends have met has passed the link; waits only while it is cut.

        Args:
            met_s: When the later of its ends came to it, the same number at both ends.

        Raises:
            TimeoutError: As `wait_until_whole`.
        """
        transfer, words = identity.transfer, identity.words()
        direction = (transfer.source, transfer.destination)
        while True:
            with self._changed:
                over_s = self._emulator.departure_s(*direction, words, num_bytes, met_s)
            if over_s is not None:
                return over_s
            met_s = self.wait_until_whole(identity, met_s, deadline_s)

    def on_link_s(self, identity: TransferIdentity) -> float:
        """How long a direct message that begins now is on its link; 0 if the link is cut.

        It has the bytes that conditions set for every message (`message_bytes`), else none.
        """
        transfer, now_s = identity.transfer, time.monotonic()
        direction = (transfer.source, transfer.destination)
        with self._changed:
            over_s = self._emulator.departure_s(*direction, identity.words(), 0, now_s)
        return 0.0 if over_s is None else over_s - now_s

    def received_s(self, identity: TransferIdentity, num_bytes: int, arrived_s: float) -> float:
        """When a delegated message that arrived in host memory is on this rank's device."""
        transfer = identity.transfer
        direction = (transfer.source, transfer.destination)
        with self._changed:
            return self._arrivals.received_s(*direction, identity.words(), num_bytes, arrived_s)

    def _healed_s(self, identity: TransferIdentity, at_s: float) -> float:
        transfer = identity.transfer
        return self._emulator.healed_s(transfer.source, transfer.destination, identity.step, at_s)


class EmulatedSum:
    """What is emulated of the direct sum of gradients over replicas.

    All replicas' ranks of a stage compute the same delay, and end together.

    Args:
        conditions: Between replicas, by their numbers.
        num_bytes: Bytes of the gradients.
        bucket_bytes: How many bytes are summed at once.

    Attributes:
        num_rounds: How many messages follow one another.
    """

    def __init__(
        self,
        conditions: Sequence[LinkCondition],
        num_replicas: int,
        num_bytes: int,
        bucket_bytes: int,
    ) -> None:
        self._of_pairs = by_direction(of_route(conditions, "direct"))
        self._conditions = tuple(conditions)
        self._num_bytes, self._bucket_bytes = num_bytes, bucket_bytes
        others = num_replicas - 1
        self.num_rounds = 2 * others * ceil(num_bytes / bucket_bytes)
        self._sent_bytes = 2 * others * num_bytes / num_replicas

    def of_pair(self, pair: tuple[int, int]) -> "EmulatedSum":
        """The same for a sum over only two of the replicas."""
        own = (each for each in self._conditions if each.between == pair)
        alone = [replace(each, between=(0, 1)) for each in own]
        return EmulatedSum(alone, 2, self._num_bytes, self._bucket_bytes)

    def delay_s(self, step: int, now_s: float) -> float:
        """How much longer a step's sum takes: the slowest pair's delay; infinity if one is cut."""
        found = (each.holding(step, now_s) for each in self._of_pairs.values())
        return max(map(self._over_pair_s, found), default=0.0)

    def _over_pair_s(self, holding: Sequence[LinkCondition]) -> float:
        if any(condition.cut for condition in holding):
            return inf
        limits = [each.bandwidth_mbps for each in holding if each.bandwidth_mbps is not None]
        wire_s = 8e-6 * self._sent_bytes / min(limits) if limits else 0.0
        return wire_s + self.num_rounds * sum(each.latency_ms for each in holding) / 1e3


def _cut_error(identity: TransferIdentity, waited_s: float) -> TimeoutError:
    waited = f"{max(waited_s, 0.0):.3g} s"
    return TimeoutError(f"{identity}: link {identity.transfer.link} is cut, still after {waited}")


def agree_on_origin_s(rendezvous: Rendezvous) -> float:
    """A common time zero, by the machine's clock; all ranks call this together."""
    return agree(rendezvous, float, time.monotonic())
