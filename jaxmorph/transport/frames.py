"""The frames that two sidecars exchange: their fields and limits, and who may send which."""

from typing import NamedTuple, TypeAlias

from jaxmorph.transport.errors import TransportError
from jaxmorph.transport.names import ChannelName, Tag

MAX_REASON_BYTES = 200
MAX_PART_BYTES = 200
MAX_AGENT_BYTES = 1 << 20
MAX_FRAME_BYTES = 256
MIN_CHUNK_BYTES = 1024
MAX_CHUNK_BYTES = 16 * 1024 * 1024
MAX_ALGORITHMS = 4
MAX_LANES = 64
MAX_MESSAGE_BYTES = 1 << 46
NONCE_BYTES = 32
PROOF_BYTES = 32


class FrameError(TransportError):
    """Bytes that are no frame, or none that may come now."""


class Challenge(NamedTuple):
    """The listener's first word: prove that you know the secret, with this number used once.

    Attributes:
        nonce: 32 random bytes.
    """

    nonce: bytes


class Introduce(NamedTuple):
    """The dialler's answer: who it is, and a challenge in return.

    Attributes:
        rank: The sending rank, which dialled.
        destination: The rank it wants to reach.
        generation: Which beginning of the sending rank this is; grows with each restart of its
            sidecar and each `connect`.
        lane: Which of its connections to that rank, from 0.
        chunk_bytes: The length of every chunk but a message's last.
        algorithms: Payload checksums it can do, best first (see `checksums.py`); at most four.
        nonce: 32 random bytes, the counter-challenge.
        proof: 32 bytes: HMAC-SHA256 of all the above and the challenge.
    """

    rank: int
    destination: int
    generation: int
    lane: int
    chunk_bytes: int
    algorithms: tuple[int, ...]
    nonce: bytes
    proof: bytes


class Welcome(NamedTuple):
    """The listener's proof; after it the connection is a lane.

    Attributes:
        generation: Which beginning of the receiving rank this is, as in `Introduce`.
        algorithm: The payload checksum to be used, one of those offered.
        proof: 32 bytes: HMAC-SHA256 of all the above and both challenges.
    """

    rank: int
    generation: int
    algorithm: int
    proof: bytes


class Resume(NamedTuple):
    """Where a channel stands, told for each channel on every new lane, by the receiver.

    Attributes:
        delivered: The number of the first message that isn't delivered yet.
        limit: The number of the first message there is no room for.
    """

    channel: ChannelName
    delivered: int
    limit: int


class Credit(NamedTuple):
    """The receiver has more room; the same fields as `Resume`."""

    channel: ChannelName
    delivered: int
    limit: int


class Acknowledge(NamedTuple):
    """A chunk has landed (or had before); also says where its channel stands, as `Credit`."""

    channel: ChannelName
    sequence: int
    offset: int
    delivered: int
    limit: int


class Chunk(NamedTuple):
    """A piece of a message; `length` bytes of payload follow it on the lane.

    Attributes:
        sequence: The message's number on it.
        total: Bytes in the whole message.
        offset: Where in the message the piece begins, a multiple of the chunk size.
        posted_ns: When the message was posted, by the sender's monotonic clock.
    """

    channel: ChannelName
    sequence: int
    total: int
    offset: int
    length: int
    tag: Tag
    posted_ns: int
    checksum: int = 0


class Ping(NamedTuple):
    """A question to be answered at once.

    Attributes:
        sent_ns: By the asker's monotonic clock.
    """

    sent_ns: int


class Pong(NamedTuple):
    """The answer.

    Attributes:
        received_ns: When the question came, by the monotonic clock of who answers.
        replied_ns: When the answer left, by the same clock.
    """

    sent_ns: int
    received_ns: int
    replied_ns: int


class Gone(NamedTuple):
    """A rank's trainer is gone, its channels with it.

    Attributes:
        reason: In words; at most 200 bytes of it travel.
    """

    rank: int
    reason: str


class AgentPart(NamedTuple):
    """A piece of what a sender must know to write into the receiver's memory by itself.

    Attributes:
        total: Bytes of the whole.
        offset: Where the piece begins; they come in order.
        data: At most 200 bytes.
    """

    total: int
    offset: int
    data: bytes


class Offer(NamedTuple):
    """A chunk that the sender would write into the receiver's memory; the fields of `Chunk`."""

    channel: ChannelName
    sequence: int
    total: int
    offset: int
    length: int
    tag: Tag
    posted_ns: int
    checksum: int = 0


class Grant(NamedTuple):
    """The answer to an offer: write it now.

    Attributes:
        offset: Where in the message the chunk begins.
        address: Where in the receiver's memory it is to be.
    """

    channel: ChannelName
    sequence: int
    offset: int
    address: int


class Written(NamedTuple):
    """A chunk that was granted is in the receiver's memory now; the first fields of `Grant`."""

    channel: ChannelName
    sequence: int
    offset: int


Frame: TypeAlias = (
    Challenge
    | Introduce
    | Welcome
    | Resume
    | Credit
    | Acknowledge
    | Chunk
    | Ping
    | Pong
    | Gone
    | AgentPart
    | Offer
    | Grant
    | Written
)

# What may come, by where: a frame of another kind ends the connection.
TO_LISTENER = (Introduce,)
TO_DIALLER = (Challenge, Welcome)
TO_RECEIVER = (Chunk, Ping, Pong, Gone)
TO_SENDER = (Acknowledge, Credit, Resume, Ping, Pong, Gone)
TO_WRITTEN = (*TO_RECEIVER, Offer, Written)  # where the sender writes into the receiver's memory
TO_WRITER = (*TO_SENDER, AgentPart, Grant)
