"""The other end of a sidecar's connection, made by hand: it says what a test tells it to."""

import contextlib
import socket
from typing import Any

from exchanges import SECRET

from jaxmorph.transport.connecting import new_nonce, sign_introduction, sign_welcome
from jaxmorph.transport.plane import TransportSettings
from jaxmorph.transport.wire import (
    TO_DIALLER,
    TO_LISTENER,
    TO_RECEIVER,
    Challenge,
    FrameReader,
    Introduce,
    Welcome,
    pack,
)

CHUNK_BYTES = TransportSettings().chunk_bytes


class Handmade:
    """A connection on which some types of frames may come."""

    def __init__(self, connection, accepted):
        self._socket, self._reader = connection, FrameReader(accepted)
        connection.settimeout(20)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def say(self, said):
        """A frame, or any bytes."""
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(said if isinstance(said, bytes) else pack(said))

    def hear(self) -> Any:
        """The next frame; None: the connection has ended."""
        while (frame := self._reader.next_frame()) is None:
            data = self._socket.recv(4096)
            if not data:
                return None
            self._reader.feed(data)
        return frame

    def hear_next(self, kind: type[Any]) -> Any:
        """The next frame of a kind; what comes before it is dropped."""
        while type(frame := self.hear()) is not kind:
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
        """Answer the challenge as rank 0 does, but for what is changed."""
        said = {
            "rank": 0,
            "destination": 1,
            "generation": 1,
            "lane": 9,
            "chunk_bytes": CHUNK_BYTES,
            "algorithms": (2,),
            **changed,
        }
        challenge = self.hear_next(Challenge)
        frame = sign_introduction(secret, challenge, Introduce(nonce=new_nonce(), **said))
        self.say(frame)
        return frame

    def become_member(self):
        self.introduce()
        assert isinstance(self.hear(), Welcome)


class HandmadeReceiver(Handmade):
    """Rank 1's end of the lane that rank 0's sidecar dials next."""

    def __init__(self, listener):
        super().__init__(listener.accept()[0], TO_LISTENER)
        challenge = Challenge(new_nonce())
        self.say(challenge)
        self.introduction = self.hear_next(Introduce)
        answer = Welcome(rank=1, generation=1, algorithm=2)
        self.say(sign_welcome(SECRET, challenge, self.introduction, answer))
        self._reader.accept(TO_RECEIVER)
