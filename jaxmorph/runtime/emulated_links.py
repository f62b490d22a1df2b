"""A rank's links as they are made to behave, on whichever route: what may change while it runs."""

import threading
import time
from collections.abc import Callable, Sequence

from jaxmorph.emulation.link_conditions import LinkCondition, of_route
from jaxmorph.program.instructions import Transfer
from jaxmorph.records import Link
from jaxmorph.runtime.rendezvous import Rendezvous, agree
from jaxmorph.runtime.routes import TransferIdentity
from jaxmorph.transport.link_emulator import LinkEmulator
from jaxmorph.transport.plane import DataPlane

Asked = Callable[[], bool]


def never() -> bool:
    """Whether to give up a transfer before its deadline, where nothing asks for that."""
    return False


class EmulatedLinks:
    """What is emulated on this rank's links: set in one place for all routes, at any time.

    Direct transfers ask it, at both ends: given the same conditions and the same times, both ends
    get the same answer, so that nothing needs to be said between them. Delegated ones are delayed
    by the data plane, which gets the same conditions. Without conditions nothing is delayed.

    Queue thread: `wait_until_whole`, `over_s`, `concern`. Training thread: `join`, `emulate`. Any
    thread: `is_cut`, `look_again`. Lock (`_changed`): the emulator's state, and its replacement.
    """

    def __init__(self) -> None:
        self._emulator = LinkEmulator(())
        self._planes: list[DataPlane] = []
        self._changed = threading.Condition()

    def concern(self, transfer: Transfer) -> bool:
        """Whether anything is emulated, at any time, on the direction that a transfer takes."""
        return self._emulator.concerns(transfer.source, transfer.destination)

    def join(self, plane: DataPlane) -> None:
        """Have a data plane follow from the next change on."""
        self._planes.append(plane)

    def emulate(self, conditions: Sequence[LinkCondition], origin_s: float | None = None) -> None:
        """Make links behave so from now on, instead of as before.

        Args:
            conditions: Of all links; those that this rank is no end of don't matter to it.
            origin_s: When the conditions' times begin, the same on all ranks; None: now.
        """
        origin_s = time.monotonic() if origin_s is None else origin_s
        with self._changed:
            self._emulator = LinkEmulator(of_route(conditions, "direct"), origin_s=origin_s)
            self._changed.notify_all()
        for plane in self._planes:
            plane.emulate(of_route(conditions, "delegated"), origin_s)

    def is_cut(self, link: Link, step: int) -> bool:
        """Whether a link delivers no direct message of a step now, in either direction."""
        now_s, (low, high) = time.monotonic(), link
        both = (low, high), (high, low)
        return any(self._emulator.is_cut(*direction, step, now_s) for direction in both)

    def look_again(self) -> None:
        """Have all that wait for a cut link ask again whether they are to give up."""
        with self._changed:
            self._changed.notify_all()

    def wait_until_whole(
        self,
        identity: TransferIdentity,
        arrived_s: float,
        deadline_s: float,
        given_up: Asked = never,
    ) -> float:
        """Wait for as long as a transfer's link is cut; when it can begin.

        Args:
            arrived_s: When this end came to it, by the monotonic clock; returned if nothing is cut.
            given_up: Whether to give up now; asked anew after `look_again`.

        Raises:
            TimeoutError: If the link is still cut at the deadline, or when it is given up.
        """
        if not self.concern(identity.transfer):
            return arrived_s
        began_s = time.monotonic()
        with self._changed:
            while (healed_s := self._healed_s(identity, arrived_s)) > max(
                arrived_s, time.monotonic()
            ):
                asked = self._emulator
                remaining_s = min(healed_s, deadline_s) - time.monotonic()
                if given_up() or (healed_s > deadline_s and remaining_s <= 0):
                    raise _cut_error(identity, time.monotonic() - began_s)
                self._changed.wait(min(remaining_s, threading.TIMEOUT_MAX))
                if asked is not self._emulator:  # healed by a change, not by time: as late as that
                    arrived_s = max(arrived_s, time.monotonic())
        return healed_s

    def over_s(
        self,
        identity: TransferIdentity,
        num_bytes: int,
        met_s: float,
        deadline_s: float,
        given_up: Asked = never,
    ) -> float:
        """When a transfer whose ends have met has passed the link; waits only where that is cut.

        Args:
            met_s: When the later of its ends came to it, as both of them know it.
            given_up: As for `wait_until_whole`, whose errors are raised.
        """
        transfer, words = identity.transfer, identity.words()
        direction = (transfer.source, transfer.destination)
        while True:
            with self._changed:
                over_s = self._emulator.departure_s(*direction, words, num_bytes, met_s)
            if over_s is not None:
                return over_s
            met_s = self.wait_until_whole(identity, met_s, deadline_s, given_up)

    def _healed_s(self, identity: TransferIdentity, at_s: float) -> float:
        transfer = identity.transfer
        return self._emulator.healed_s(transfer.source, transfer.destination, identity.step, at_s)


def _cut_error(identity: TransferIdentity, waited_s: float) -> TimeoutError:
    waited = f"{max(waited_s, 0.0):.3g} s"
    return TimeoutError(f"{identity}: link {identity.transfer.link} is cut, still after {waited}")


def agree_on_origin_s(rendezvous: Rendezvous) -> float:
    """A time from which all ranks count, by the clock of their machine; all call this at once."""
    return agree(rendezvous, float, time.monotonic())
