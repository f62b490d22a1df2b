"""How two ends of a connection prove that they know the run's secret, without telling it.

Each proof is an HMAC-SHA256 over the other end's nonce, so that an old one is worth nothing, over
its own nonce, and over all that the frame says, so that nobody can change it on the way. The two
directions have labels of their own: a proof can't be sent back to its maker.
"""

import hmac
import os

from jaxmorph.transport.frames import (
    NONCE_BYTES,
    PROOF_BYTES,
    Challenge,
    FrameError,
    Introduce,
    Welcome,
)
from jaxmorph.transport.messages import signed_part

_NO_PROOF = bytes(PROOF_BYTES)


def new_nonce() -> bytes:
    """32 bytes that nobody can foresee."""
    return os.urandom(NONCE_BYTES)


def introduction(
    secret: bytes,
    challenge: Challenge,
    *,
    rank: int,
    destination: int,
    generation: int,
    lane: int,
    chunk_bytes: int,
    algorithms: tuple[int, ...],
) -> Introduce:
    """The dialler's answer to a challenge, proof included; see `Introduce` for the fields."""
    frame = Introduce(
        rank, destination, generation, lane, chunk_bytes, algorithms, new_nonce(), _NO_PROOF
    )
    return frame._replace(proof=_introduction_proof(secret, challenge, frame))


def check_introduction(secret: bytes, challenge: Challenge, frame: Introduce) -> None:
    """Pass if the dialler knows the secret.

    Raises:
        FrameError: If its proof is wrong.
    """
    if not hmac.compare_digest(_introduction_proof(secret, challenge, frame), frame.proof):
        raise FrameError("an introduction's proof is wrong")


def welcome(
    secret: bytes,
    challenge: Challenge,
    introduce: Introduce,
    *,
    rank: int,
    generation: int,
    algorithm: int,
) -> Welcome:
    """The listener's answer to an introduction that was checked."""
    frame = Welcome(rank, generation, algorithm, _NO_PROOF)
    return frame._replace(proof=_welcome_proof(secret, challenge, introduce, frame))


def check_welcome(
    secret: bytes, challenge: Challenge, introduce: Introduce, frame: Welcome
) -> None:
    """Pass if the listener is the rank that was dialled, knows the secret, and keeps to the offer.

    Raises:
        FrameError: If its proof is wrong, it is another rank, or its checksum wasn't offered.
    """
    if not hmac.compare_digest(_welcome_proof(secret, challenge, introduce, frame), frame.proof):
        raise FrameError("a welcome's proof is wrong")
    if frame.rank != introduce.destination:
        raise FrameError(f"dialled rank {introduce.destination}, rank {frame.rank} answered")


def _introduction_proof(secret: bytes, challenge: Challenge, frame: Introduce) -> bytes:
    said = b"jaxmorph introduction" + challenge.nonce + signed_part(frame)
    return hmac.digest(secret, said, "sha256")


def _welcome_proof(
    secret: bytes, challenge: Challenge, introduce: Introduce, frame: Welcome
) -> bytes:
    said = b"jaxmorph welcome" + introduce.nonce + challenge.nonce + signed_part(frame)
    return hmac.digest(secret, said, "sha256")
