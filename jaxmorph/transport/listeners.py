"""Sockets on which a rank's peers reach it, and how addresses are told apart."""

import socket
from collections.abc import Sequence

_BACKLOG = 128


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 for an address with colons in it, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listen_on(hosts: Sequence[str]) -> list[socket.socket]:
    """A non-blocking listening socket on each address, on ports that the system chooses."""
    listeners: list[socket.socket] = []
    try:
        for host in hosts:
            listener = socket.socket(family_of(host), socket.SOCK_STREAM)
            listeners.append(listener)
            listener.bind((host, 0))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners
