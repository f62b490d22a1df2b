"""A lower bound for a sidecar in Python: a relay that only passes messages on.

Trainer, relay, relay, trainer: shared memory and an eventfd between a trainer and its relay, one
TCP connection between the relays. There are no chunks, checksums, acknowledgements or lanes, and
no fault is survived. The difference to the data plane is the cost of its guarantees.
"""

import select
import socket
import struct
import subprocess
import sys
import time

from jaxmorph.transport.doorbell import Doorbell
from jaxmorph.transport.names import TAG_WORDS, add, distance
from jaxmorph.transport.slots import MessageInfo, Slots

_LENGTH = struct.Struct("<Q")
_NO_TAG = (0,) * TAG_WORDS
_NUM_BELLS = 3
_PATIENCE_S = 120.0


class Chain:
    """A trainer's end, and the relay that it has started.

    Args:
        connection: To the other relay; it is handed to the relay.
        num_slots: How many messages may be under way at each end; a power of two.
        slot_bytes: The longest message.
    """

    def __init__(self, connection: socket.socket, num_slots: int, slot_bytes: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._leaving = Slots.create(num_slots, slot_bytes)
        self._coming = Slots.create(num_slots, slot_bytes)
        self._work, self._room, self._landed = (Doorbell.create() for _ in range(_NUM_BELLS))
        for number in range(num_slots):
            self._leaving.payload(number)[:] = 1
        bells = [bell.fileno() for bell in (self._work, self._room, self._landed)]
        fds = (connection.fileno(), self._leaving.fd, self._coming.fd, *bells)
        numbers = map(str, (num_slots, slot_bytes, *fds))
        self._relay = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bare_chain", *numbers],
            stdin=subprocess.PIPE,  # it ends with this process
            pass_fds=fds,
        )
        connection.close()

    def send(self, num_bytes: int) -> None:
        """Send a message whose payload is in its slot already."""
        slots = self._leaving
        deadline_s = time.monotonic() + _PATIENCE_S
        self._room.wait_until(lambda: _in_use(slots) < slots.num_slots, deadline_s)
        sequence = slots.produced
        slots.write_info(sequence, MessageInfo(num_bytes, _NO_TAG, 0, 0))
        slots.produced = add(sequence, 1)
        self._work.ring()

    def receive(self, num_bytes: int) -> None:
        """Receive a message and leave it where it is."""
        slots = self._coming
        self._landed.wait_until(lambda: _in_use(slots) > 0, time.monotonic() + _PATIENCE_S)
        is_full = _in_use(slots) == slots.num_slots
        slots.consumed = add(slots.consumed, 1)
        if is_full:
            self._work.ring()

    def close(self) -> None:
        """End, the relay too."""
        self._relay.communicate()
        for each in (self._leaving, self._coming, self._work, self._room, self._landed):
            each.close()


class Relay:
    """The process between a trainer and the other relay.

    Args:
        connection: To the other relay.
        leaving: The trainer's messages.
        coming: Where it takes those for it from.
        bells: Rung for this relay, for room in `leaving`, and for messages in `coming`.
    """

    def __init__(
        self, connection: socket.socket, leaving: Slots, coming: Slots, bells: list[Doorbell]
    ) -> None:
        self._connection, self._leaving, self._coming = connection, leaving, coming
        self._work, self._room, self._landed = bells

    def run(self) -> None:
        """Hand messages on until the trainer or the other relay is gone."""
        connection, work, trainer = self._connection.fileno(), self._work.fileno(), 0
        waiting = select.epoll()
        waiting.register(connection, select.EPOLLIN)
        waiting.register(work, select.EPOLLIN | select.EPOLLET)
        waiting.register(trainer, select.EPOLLIN)
        while True:
            for fd, _ in waiting.poll():
                if fd == work:
                    self._send()
                elif fd == trainer or not self._receive():
                    return

    def _send(self) -> None:
        slots = self._leaving
        while _in_use(slots):
            sequence = slots.consumed
            num_bytes = slots.read_info(sequence).num_bytes
            pieces = [_LENGTH.pack(num_bytes), slots.view(sequence, num_bytes)]
            sent = self._connection.sendmsg(pieces) - _LENGTH.size
            if sent < num_bytes:
                self._connection.sendall(pieces[1][sent:])
            slots.consumed = add(sequence, 1)
            self._room.ring()

    def _receive(self) -> bool:
        head = self._connection.recv(_LENGTH.size, socket.MSG_WAITALL)
        if not head:
            return False
        slots = self._coming
        deadline_s = time.monotonic() + _PATIENCE_S
        self._work.wait_until(lambda: _in_use(slots) < slots.num_slots, deadline_s)
        memory, at = slots.view(slots.produced, _LENGTH.unpack(head)[0]), 0
        while at < len(memory):
            at += self._connection.recv_into(memory[at:])
        slots.produced = add(slots.produced, 1)
        self._landed.ring()
        return True


def _in_use(slots: Slots) -> int:
    return distance(slots.produced, slots.consumed)


def main() -> None:
    """Be a relay; the arguments are those that `Chain` gives."""
    num_slots, slot_bytes, connection, leaving, coming, *bells = map(int, sys.argv[1:])
    Relay(
        socket.socket(fileno=connection),
        Slots(leaving, num_slots, slot_bytes),
        Slots(coming, num_slots, slot_bytes),
        [Doorbell(bell) for bell in bells],
    ).run()


if __name__ == "__main__":
    main()
