"""A handmade end of a sidecar's connection, which sends whatever a test asks."""

import contextlib
import socket
from typing import Any

from exchanges import SECRET

from jaxmorph.transport.connecting import sign_introduction, transcript
from jaxmorph.transport.plane import TransportSettings
from jaxmorph.transport.secret import new_nonce, plain_check, seals
from jaxmorph.transport.wire import (
    TO_DIALLER,
    TO_SENDER,
    Challenge,
    FrameReader,
    Introduce,
    Welcome,
    pack,
)

CHUNK_BYTES = TransportSettings().chunk_bytes


class Handmade:
    """A connection that accepts some types of frames."""

    def __init__(self, connection, accepted):
        self._socket, self._reader = connection, FrameReader(accepted)
        self.seal = plain_check
        connection.settimeout(20)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def send(self, data):
        """A frame, or any bytes."""
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(data if isinstance(data, bytes) else pack(data, self.seal))

    def authenticate(self, *handshake, is_caller):
        """Seal what follows a handshake."""
        said = transcript(*handshake)
        self.seal, self._reader.check = seals(SECRET, *said, is_caller=is_caller)

    def receive(self) -> Any:
        """The next frame; None at the end of the connection."""
        while (frame := self._reader.next_frame()) is None:
            data = self._socket.recv(4096)
            if not data:
                return None
            self._reader.feed(data)
        return frame

    def receive_next(self, kind: type[Any]) -> Any:
        """The next frame of a kind; drops the frames before it."""
        while type(frame := self.receive()) is not kind:
            assert frame is not None, "closed by the sidecar"
        return frame

    def is_dropped(self):
        with contextlib.suppress(ConnectionError):
            while self._socket.recv(4096):
                pass
        return True


class Guest(Handmade):
    """A connection to rank 1's sidecar."""

    def __init__(self, plane):
        super().__init__(socket.create_connection(plane.addresses()[0]), TO_DIALLER)

    def introduce(self, secret=SECRET, **changed):
        """Answer the challenge as rank 0 does, except for what is changed."""
        fields = {
            "rank": 0,
            "destination": 1,
            "generation": 1,
            "lane": 9,
            "chunk_bytes": CHUNK_BYTES,
            "algorithms": (2,),
            **changed,
        }
        self.challenge = self.receive_next(Challenge)
        frame = sign_introduction(secret, self.challenge, Introduce(nonce=new_nonce(), **fields))
        self.send(frame)
        return frame

    def become_member(self):
        introduction, answer = self.introduce(), self.receive()
        assert isinstance(answer, Welcome)
        self._reader.accept(TO_SENDER)
        self.authenticate(self.challenge, introduction, answer, is_caller=True)
