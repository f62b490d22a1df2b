"""The run's secret: where it comes from, how two ends prove that they know it, and what they seal.

The secret itself is never sent. Two ends of a connection exchange random nonces and HMACs of
them, and derive keys from both nonces, so that everything that follows can be authenticated.
docs/explanation/security.md says what this protects.
"""

import hmac
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

from jaxmorph.errors import UserError

VARIABLE = "JAXMORPH_SECRET_FILE"
SECRET_FILE = ".secret"
"""The name of the secret's file in a run's directory."""

NONCE_BYTES = 32
PROOF_BYTES = 32
SEAL_BYTES = 16

_FEWEST_BYTES, _MOST_BYTES = 32, 4096
_FOR_OTHERS = stat.S_IWGRP | stat.S_IRWXO
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def run_secret(directory: Path | None) -> bytes:
    """The secret of a run whose ranks share a directory; the first rank that asks makes it.

    Args:
        directory: None: the run has none.

    Raises:
        UserError: If the secret's file can't be made or read, or if other users can access it.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return _read(Path(named))
    if directory is None:
        raise UserError(
            f"{VARIABLE}: not set, expected a file with a secret that all ranks can read, as there "
            "is no run.dir to keep one in (openssl rand -hex 32 writes one; chmod 600)"
        )
    path = directory / SECRET_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _make(path)
    except OSError as error:
        raise _problem(path, f"cannot be made ({error.strerror})") from error
    return _read(path)


def _make(path: Path) -> None:
    """Make a new secret, unless another rank is quicker: `os.link` replaces no file."""
    written = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(written, _NEW, 0o600), "w") as file:
            file.write(secrets.token_hex(NONCE_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(written, path)
    finally:
        written.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would block
        with os.fdopen(fd, "rb") as file:
            _require_private(path, os.fstat(fd))
            content = file.read(_MOST_BYTES + 1).strip()
    except OSError as error:
        raise _problem(path, f"cannot be read ({error.strerror})") from error
    if not _FEWEST_BYTES <= len(content) <= _MOST_BYTES:
        expected = f"{_FEWEST_BYTES} to {_MOST_BYTES}"
        raise _problem(path, f"has a secret of {len(content)} bytes, expected {expected}")
    return content


def _require_private(path: Path, found: os.stat_result) -> None:
    mode, trusted = stat.S_IMODE(found.st_mode), {os.geteuid(), 0, path.parent.stat().st_uid}
    if not stat.S_ISREG(found.st_mode):
        raise _problem(path, "is not a regular file")
    if mode & _FOR_OTHERS:
        raise _problem(path, f"has mode {mode:04o}, so that others can use it: expected 0600")
    if found.st_uid not in trusted:
        raise _problem(path, f"belongs to user {found.st_uid}, expected {os.geteuid()}")


def _problem(path: Path, what: str) -> UserError:
    return UserError(f"{path}: the run's secret {what}; {VARIABLE} can name another file")


def hand_down() -> int:
    """Write a new secret to an unnamed file; returns a descriptor for child processes."""
    fd = os.memfd_create("jaxmorph secret")
    os.write(fd, secrets.token_bytes(NONCE_BYTES))
    return fd


def inherited_secret(fd: int) -> bytes:
    """The secret that `hand_down` has made; closes the descriptor."""
    try:
        return os.pread(fd, NONCE_BYTES, 0)
    finally:
        os.close(fd)


def new_nonce() -> bytes:
    """32 unpredictable bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def derived(secret: bytes, label: str, *parts: bytes) -> bytes:
    """An HMAC-SHA256 of a label and parts: a proof of the secret, or a key made from it."""
    # Each part follows its length, so no two lists of parts give the same bytes.
    pieces = (label.encode(), *parts)
    framed = b"".join(len(piece).to_bytes(4, "little") + piece for piece in pieces)
    return hmac.digest(secret, framed, "sha256")


def is_proof(proof: bytes, secret: bytes, label: str, *parts: bytes) -> bool:
    """Whether `proof` is what `derived` returns for the other arguments."""
    return hmac.compare_digest(proof, derived(secret, label, *parts))


Check: TypeAlias = Callable[[Any], bytes]
"""Returns the `SEAL_BYTES` that follow a message (bytes-like) on a connection."""


def plain_check(data: Any) -> bytes:
    """A hash, which finds flipped bits; anyone can make it."""
    return blake2b(data, digest_size=SEAL_BYTES).digest()


class Seal:
    """Authenticates the messages of one end of a connection; the other end has one like it.

    A seal is a keyed BLAKE2b over the message and its number on the connection. So without the key
    no message can be forged, changed, dropped, repeated or reordered. Seals are made and checked in
    the order of the messages.
    """

    __slots__ = ("_key", "_number")

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def __call__(self, data: Any) -> bytes:
        """The next message's seal."""
        self._number += 1
        number = self._number.to_bytes(16, "little")
        return blake2b(data, digest_size=SEAL_BYTES, key=self._key, salt=number).digest()


def seals(secret: bytes, *transcript: bytes, is_caller: bool) -> tuple[Seal, Seal]:
    """This end's seal and the peer's, from all that both ends said in their handshake.

    Args:
        is_caller: Whether this end has called the other. Each direction has a key of its own, so
            that no message can be sent back to its maker.
    """
    calls, answers = (
        Seal(derived(secret, label, *transcript)) for label in ("caller's seal", "listener's seal")
    )
    return (calls, answers) if is_caller else (answers, calls)
