"""Shared memory for a channel's messages: fixed slots, and counters that two processes read.

Every item that one process writes and another polls has its own 64-byte cache line:

====================  ========================================================================
line                  holds
====================  ========================================================================
0                     magic, version, number of slots, bytes in a slot
1                     `produced`: the number of the next message to be announced (outgoing) or
                      delivered to the rank (incoming)
2                     `consumed`: the number of the first message that is not known to be delivered
                      (outgoing), or that the rank has not released (incoming)
3 + 2 * slot          `signal`: message number + 1 once the payload is complete; before that, the
                      value of an earlier message. The sidecar sends a message once it is announced
                      and complete
4 + 2 * slot          `info`: length, tag, when it was posted and when it was received
next page             the payloads, each on pages of its own
====================  ========================================================================

Counts and sequence numbers are 32 bits and wrap; message q is in slot q % number of slots, which
is therefore a power of two. The memory has no name, so the system frees it even if a process is
killed. Its contents outlive the sidecar, and a new sidecar resumes from them.

A process that sees a new count or signal also sees the payload and info written before it
(`_order`).
"""

import contextlib
import fcntl
import mmap
import os
import platform
import struct
import threading
from typing import NamedTuple

import numpy as np

from jaxmorph.transport.names import MASK, TAG_WORDS, WRAP, Tag, TransportError, add

NO_TIME_NS = 0

_LINE = 64
_LINE_WORDS = _LINE // 4
_PAGE = mmap.PAGESIZE
_MAGIC = 0x6A6D7368
_VERSION = 1
_HEADER = struct.Struct("=IIQQ")
_INFO = struct.Struct(f"=Q{TAG_WORDS}IQQ")
_POSTED, _POSTED_AT = struct.Struct("=Q"), struct.calcsize(f"=Q{TAG_WORDS}I")
_PRODUCED, _CONSUMED = _LINE_WORDS, 2 * _LINE_WORDS
_FIRST_SLOT, _SLOT_LINES = 3, 2
_MAX_BYTES = 1 << 46
_LAST_NS = (1 << 64) - 1
_lock = threading.Lock()
_KEEPS_ORDER = platform.machine().lower() in ("x86_64", "amd64")


class MessageInfo(NamedTuple):
    """The description of a message.

    Attributes:
        posted_ns: When the sender posted it, by this host's monotonic clock; at the receiver an
            estimate. If a device completes the payload (0 until then), or the sidecar first found
            it incomplete: when the sidecar saw it complete.
        received_ns: When it was delivered: it and all messages before it on the channel were
            complete. 0 at the sender's end.
    """

    num_bytes: int
    tag: Tag
    posted_ns: int
    received_ns: int


class Slots:
    """One end of a channel: its slots and counts, mapped into this process.

    Args:
        fd: The memory's file descriptor; `close` closes it.
        fresh_at: The number of the first message if the memory is new; None: it is in use.

    Raises:
        TransportError: If the sizes are impossible, or don't match the memory.
    """

    def __init__(
        self, fd: int, num_slots: int, slot_bytes: int, fresh_at: int | None = None
    ) -> None:
        self.fd, self.num_slots, self.slot_bytes = fd, num_slots, slot_bytes
        self._stride, self._payloads_at, total = _layout(num_slots, slot_bytes)
        if os.fstat(fd).st_size < total:
            raise TransportError(
                f"slots need {total} bytes, the shared memory has {os.fstat(fd).st_size}"
            )
        self._memory = mmap.mmap(fd, total)
        self._words = memoryview(self._memory)[: self._payloads_at].cast("I")
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._base = self._bytes.ctypes.data
        if fresh_at is not None:
            self._write_fresh(fresh_at)
        self._check_header()

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int, first_sequence: int = 0) -> "Slots":
        """New memory, empty, whose first message will have the given number."""
        fd = _anonymous_memory(_layout(num_slots, slot_bytes)[2])
        try:
            return cls(fd, num_slots, slot_bytes, first_sequence & MASK)
        except BaseException:
            os.close(fd)
            raise

    @property
    def memory(self) -> tuple[int, int]:
        """The page-aligned address of the whole memory in this process, and its length in bytes."""
        return self._base, len(self._bytes)

    @property
    def produced(self) -> int:
        """The number of the next message to be announced (outgoing) or delivered (incoming)."""
        return self._seen(_PRODUCED)

    @produced.setter
    def produced(self, count: int) -> None:
        _order()
        self._words[_PRODUCED] = count & MASK

    @property
    def consumed(self) -> int:
        """The number of the first message not known delivered (outgoing) or released (incoming)."""
        return self._seen(_CONSUMED)

    @consumed.setter
    def consumed(self, count: int) -> None:
        _order()
        self._words[_CONSUMED] = count & MASK

    def is_complete(self, sequence: int) -> bool:
        """Whether the message's payload is complete."""
        return self._seen(self._signal_word(sequence)) == add(sequence, 1)

    def mark_complete(self, sequence: int) -> None:
        """Mark the payload complete; it must not be written after this."""
        _order()
        self._words[self._signal_word(sequence)] = add(sequence, 1)

    def write_info(self, sequence: int, info: MessageInfo) -> None:
        """Describe the message, before it is announced."""
        num_bytes, tag, posted_ns, received_ns = info
        at = self._info_byte(sequence)
        posted_ns = min(posted_ns, _LAST_NS)  # a peer's clock may say anything
        _INFO.pack_into(self._memory, at, num_bytes, *tag, posted_ns, received_ns)

    def read_info(self, sequence: int) -> MessageInfo:
        """The message's description."""
        found = _INFO.unpack_from(self._memory, self._info_byte(sequence))
        return MessageInfo(found[0], found[1:-2], found[-2], found[-1])

    def write_posted(self, sequence: int, posted_ns: int) -> None:
        """Change when the message was posted."""
        _POSTED.pack_into(self._memory, self._info_byte(sequence) + _POSTED_AT, posted_ns)

    def payload(self, sequence: int) -> np.ndarray:
        """The whole slot of a message, uint8 [slot_bytes], as a view of the memory."""
        start = self._payload_byte(sequence)
        return self._bytes[start : start + self.slot_bytes]

    def view(self, sequence: int, num_bytes: int) -> memoryview:
        """The first bytes of a message's slot, for sockets."""
        start = self._payload_byte(sequence)
        return memoryview(self._memory)[start : start + min(num_bytes, self.slot_bytes)]

    def payloads(self) -> memoryview:
        """All slots' payloads, for network cards that need memory registered."""
        return memoryview(self._memory)[self._payloads_at :]

    def payload_address(self, sequence: int) -> int:
        """The address of the message's payload in this process."""
        return self._base + self._payload_byte(sequence)

    def signal_address(self, sequence: int) -> int:
        """The address of the message's `signal` word in this process."""
        return self._base + 4 * self._signal_word(sequence)

    def close_fd(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def close(self) -> None:
        """Free the memory; it stays mapped while views of it exist."""
        self.close_fd()
        with contextlib.suppress(BufferError):
            self._words.release()
            del self._bytes
            self._memory.close()

    def _write_fresh(self, first: int) -> None:
        _HEADER.pack_into(self._memory, 0, _MAGIC, _VERSION, self.num_slots, self.slot_bytes)
        for number in range(self.num_slots):
            # A fresh slot must not look complete, so its signal gets the number of the message one
            # round earlier.
            before = add(first, number - self.num_slots)
            self.mark_complete(before)
        self.produced = self.consumed = first

    def _check_header(self) -> None:
        found = _HEADER.unpack_from(self._memory, 0)
        expected = (_MAGIC, _VERSION, self.num_slots, self.slot_bytes)
        if found != expected:
            raise TransportError(
                f"slots are described as {found}, expected {expected} "
                "(magic, version, number of slots, bytes in a slot)"
            )

    def _seen(self, word: int) -> int:
        """A count or a signal, read before all that it covers."""
        value = self._words[word]
        if not _KEEPS_ORDER:
            _order()
        return value

    def _line(self, sequence: int) -> int:
        return _FIRST_SLOT + _SLOT_LINES * (sequence & (self.num_slots - 1))

    def _signal_word(self, sequence: int) -> int:
        return self._line(sequence) * _LINE_WORDS

    def _info_byte(self, sequence: int) -> int:
        return (self._line(sequence) + 1) * _LINE

    def _payload_byte(self, sequence: int) -> int:
        return self._payloads_at + (sequence & (self.num_slots - 1)) * self._stride


def _layout(num_slots: int, slot_bytes: int) -> tuple[int, int, int]:
    """Bytes from one payload to the next, before the first payload, and in total."""
    if num_slots < 1 or num_slots & (num_slots - 1) or num_slots >= WRAP:
        raise TransportError(f"a channel has {num_slots} slots; expected a power of two")
    if slot_bytes < 1:
        raise TransportError(f"a slot has {slot_bytes} bytes; expected at least 1")
    stride = _whole_pages(slot_bytes)
    payloads_at = _whole_pages((_FIRST_SLOT + _SLOT_LINES * num_slots) * _LINE)
    total = payloads_at + num_slots * stride
    if total > _MAX_BYTES:
        raise TransportError(f"{num_slots} slots of {slot_bytes} bytes are more than memory holds")
    return stride, payloads_at, total


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def _order() -> None:
    """Order the reads and writes before this call ahead of those after it, for other processes.

    x86-64 keeps stores in order, and loads too, so there this binds only the compiler. AArch64 lets
    both move into a locked section from either side, but keeps a release before the next acquire:
    nothing moves down past the first release, or up past the second acquire. (Reasoned from Arm's
    memory model, not tested on such a machine.)
    """
    with _lock:
        pass
    if not _KEEPS_ORDER:
        with _lock:
            pass


def _anonymous_memory(num_bytes: int) -> int:
    """A file descriptor of new zeroed memory that has no name and a fixed size."""
    fd = os.memfd_create("jaxmorph-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)  # else other users could open it through /proc
    _set_size(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def _set_size(fd: int, num_bytes: int) -> None:
    try:
        os.ftruncate(fd, num_bytes)
    except OSError as error:
        os.close(fd)
        raise TransportError(f"no shared memory of {num_bytes} bytes: {error}") from error
