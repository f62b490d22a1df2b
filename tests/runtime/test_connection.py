"""Messages between two processes, and what is said of a connection that is lost."""

import errno
import os
import socket
from typing import Any, cast

import pytest

from jaxmorph.runtime.connection import Connection, ConnectionLostError


class Failing:
    """A socket on which nothing goes any more."""

    def __init__(self, number):
        self.error = OSError(number, os.strerror(number))

    def setsockopt(self, *arguments): ...

    def settimeout(self, deadline_s): ...

    def sendall(self, message):
        raise self.error

    def recv(self, length):
        raise self.error


@pytest.mark.parametrize(
    "number",
    [errno.EHOSTUNREACH, errno.ENETDOWN, errno.ETIMEDOUT, errno.ECONNRESET, errno.EPIPE],
)
def test_whatever_the_kernel_gives_up_for_the_connection_is_lost(number):
    connection = Connection(cast(Any, Failing(number)), 1.0)
    says = os.strerror(number)
    with pytest.raises(ConnectionLostError, match=says):
        connection.send(b"1")
    with pytest.raises(ConnectionLostError, match=says):
        connection.receive()


def test_a_peer_that_is_silent_until_the_deadline_is_not_lost():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    with here, there:
        connection = Connection(there, 0.05)
        with pytest.raises(TimeoutError):
            connection.receive()
        here.sendall(b"\0\0\0\1x")
        assert connection.receive() == b"x"
