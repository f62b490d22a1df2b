"""A network between two sidecars that forwards, corrupts or breaks connections."""

import contextlib
import socket
import threading


class Proxy:
    """Forwards connections to an address, and breaks them on demand."""

    def __init__(self, target):
        self._target, self._left, self._open = target, None, True
        self._spoils_every, self._until_spoilt, self.spoilt = None, 0, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._connections = []
        self._lock = threading.Lock()

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.refuse()

    def refuse(self):
        """Break all connections, and refuse new ones until `accept_again`."""
        with self._lock:
            self._open = False
        with contextlib.suppress(OSError):  # it is closed already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._break()

    def accept_again(self):
        self._listener, self._open = socket.create_server(self.address), True
        self.__enter__()

    def break_after(self, num_bytes):
        with self._lock:
            self._left = num_bytes

    def spoil_every(self, num_bytes):
        """Flip a bit of what goes to the address, each time that so many bytes have."""
        with self._lock:
            self._spoils_every = self._until_spoilt = num_bytes

    def _accept(self):
        listener = self._listener
        with contextlib.suppress(OSError):
            while True:
                ours, _ = listener.accept()
                theirs = socket.create_connection(self._target)
                for connection in (ours, theirs):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    if not self._open or listener is not self._listener:  # since it was accepted
                        ours.close()
                        theirs.close()
                        return
                    self._connections += [ours, theirs]
                there = (ours, theirs, self._spoil)
                back = (theirs, ours, lambda data: data)
                for direction in (there, back):
                    threading.Thread(target=self._pass, args=direction, daemon=True).start()

    def _pass(self, source, sink, change):
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                sink.sendall(self._allowed(change(data)))
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _spoil(self, data):
        with self._lock:
            if self._spoils_every is None:
                return data
            at, self._until_spoilt = self._until_spoilt, self._until_spoilt - len(data)
            if self._until_spoilt > 0:
                return data
            self._until_spoilt, self.spoilt = self._spoils_every, self.spoilt + 1
            return data[: at - 1] + bytes([data[at - 1] ^ 1 << self.spoilt % 8]) + data[at:]

    def _allowed(self, data):
        with self._lock:
            if self._left is None:
                return data
            allowed, self._left = data[: self._left], self._left - len(data)
            if self._left > 0:
                return data
            self._left = None
        self._break()
        return allowed

    def _break(self):
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
