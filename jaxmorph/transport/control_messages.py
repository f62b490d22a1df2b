"""What a trainer and its sidecar tell each other over their socket pair: records with descriptors.

A record is a length and a number of descriptors (two 32-bit words), then that many bytes of JSON;
its descriptors travel beside it, and are handed out in the order in which records arrive.
"""

import array
import json
import os
import socket
import struct
from collections import deque
from typing import Any

_HEAD = struct.Struct("=II")
_MAX_RECORD_BYTES = 1 << 26  # three links' conditions by a long trace are 30 MB or so
_MAX_DESCRIPTORS = 64
_READ_BYTES = 1 << 16

Record = dict[str, Any]


def send_record(link: socket.socket, record: Record, fds: tuple[int, ...] = ()) -> None:
    """Send one record whole, and duplicates of the descriptors with it; waits for room."""
    body = json.dumps(record).encode()
    data = memoryview(_HEAD.pack(len(body), len(fds)) + body)
    sent = socket.send_fds(link, [data], list(fds)) if fds else 0
    link.sendall(data[sent:])


class RecordReader:
    """Puts together the records that arrive on a socket."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._fds: deque[int] = deque()

    def read(self, link: socket.socket) -> list[tuple[Record, tuple[int, ...]]]:
        """The records completed by one read of the socket, each with its descriptors.

        Raises:
            EOFError: If the other end is closed.
            BlockingIOError: If the socket doesn't block and has nothing.
        """
        try:
            data, ancillary, _, _ = link.recvmsg(
                _READ_BYTES, socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS), _CLOSE_ON_EXEC
            )
        except ConnectionError as error:
            raise EOFError("the other end is gone") from error
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds.extend(_descriptors(content))
        if not data:
            raise EOFError("the other end is closed")
        self._data += data
        return self._complete_records()

    def close(self) -> None:
        """Close descriptors that no record has claimed."""
        while self._fds:
            os.close(self._fds.popleft())

    def _complete_records(self) -> list[tuple[Record, tuple[int, ...]]]:
        records = []
        while len(self._data) >= _HEAD.size:
            num_bytes, num_fds = _HEAD.unpack_from(self._data)
            if num_bytes > _MAX_RECORD_BYTES or num_fds > _MAX_DESCRIPTORS:
                raise EOFError(f"a record of {num_bytes} bytes and {num_fds} descriptors")
            end = _HEAD.size + num_bytes
            if len(self._data) < end:
                break
            record = json.loads(self._data[_HEAD.size : end])
            records.append((record, tuple(self._fds.popleft() for _ in range(num_fds))))
            del self._data[:end]
        return records


_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def _descriptors(content: bytes) -> list[int]:
    found = array.array("i")
    found.frombytes(content[: len(content) - len(content) % found.itemsize])
    for fd in found:
        os.set_inheritable(fd, False)
    return list(found)
