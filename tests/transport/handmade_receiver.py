"""The other end of a lane that a sidecar dials, made by hand: it says what a test tells it to."""

import contextlib
from typing import Any

from exchanges import SECRET

from jaxmorph.transport.connecting import new_nonce, sign_welcome
from jaxmorph.transport.wire import (
    TO_LISTENER,
    TO_RECEIVER,
    Challenge,
    FrameReader,
    Introduce,
    Welcome,
    pack,
)


class HandmadeReceiver:
    """Rank 1's end of the lane that rank 0's sidecar dials next."""

    def __init__(self, listener):
        self._socket, _ = listener.accept()
        self._socket.settimeout(20)
        self._reader = FrameReader(TO_LISTENER)
        challenge = Challenge(new_nonce())
        self.say(challenge)
        self.introduction = self.hear(Introduce)
        answer = Welcome(rank=1, generation=1, algorithm=2)
        self.say(sign_welcome(SECRET, challenge, self.introduction, answer))
        self._reader.accept(TO_RECEIVER)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def say(self, frame):
        self._socket.sendall(pack(frame))

    def hear(self, kind: type[Any]) -> Any:
        """The next frame of a kind; what comes before it is dropped."""
        while True:
            frame = self._reader.next_frame()
            if type(frame) is kind:
                return frame
            if frame is None:
                data = self._socket.recv(4096)
                assert data, "closed by the sidecar"
                self._reader.feed(data)

    def is_dropped(self):
        with contextlib.suppress(ConnectionError):
            while self._socket.recv(4096):
                pass
        return True
