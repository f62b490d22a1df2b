"""Checksums of a checkpoint's files: the writing rank makes them, a resume compares them.

`virtual_stage_K.files` lists the files of a part, the manifest has the checksum of each list, and
`manifest.seal` has that of the manifest. So any changed byte and any missing file is found.

Checksums are CRC-32s with lengths: they detect faults of disks, memory and interrupted copies, but
no deliberate change.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from jaxmorph.progress import progress

_CHUNK_BYTES = 1 << 22
_THREADS = 4  # reading and `crc32` release Python's lock
_MIN_BYTES_FOR_THREADS = 1 << 24
_PAUSES_S = (0.5, 2.0, 5.0)

T = TypeVar("T")


@dataclass(frozen=True)
class FileSum:
    """The length and checksum of a file."""

    num_bytes: int
    crc32: str
    """Eight hexadecimal digits."""

    def __str__(self) -> str:
        return f"{self.num_bytes:,} bytes of CRC-32 {self.crc32}"


@dataclass(frozen=True)
class Damage:
    """Why a checkpoint is not whole: a file, what was got, and what was expected."""

    file: Path
    got: str
    expected: str

    def __str__(self) -> str:
        return f"{self.file}: got {self.got}, expected {self.expected}"


def sum_of(content: bytes) -> FileSum:
    """The length and checksum of a file with this content."""
    return FileSum(len(content), f"{crc32(content):08x}")


def list_files(folder: Path) -> bytes:
    """Syncs all files in a folder to disk and lists them with their checksums.

    Returns:
        A JSON object from relative paths to `FileSum`s.
    """
    paths = sorted(folder.rglob("*"))
    files = (path for path in paths if path.is_file())
    sums = {f"{path.relative_to(folder)}": asdict(_synced_sum(path)) for path in files}
    for inner in (folder, *(path for path in paths if path.is_dir())):
        with suppress(OSError):  # not every file system can sync a folder; its files are synced
            sync_folder(inner)
    return json.dumps(sums, indent=1).encode()


def read_list(content: bytes) -> dict[str, FileSum]:
    """Reads what `list_files` made."""
    try:
        return {name: FileSum(**entry) for name, entry in json.loads(content).items()}
    except (TypeError, AttributeError) as error:
        raise ValueError(f"got no list of files: {error!r}") from error


def find_damage(folder: Path, expected: Mapping[str, FileSum], *, thorough: bool) -> Damage | None:
    """The first file that differs from what is expected, if any.

    Args:
        thorough: Read the files; otherwise compare only their lengths.
    """
    paths = [folder / name for name in expected]
    compare = partial(_damage, thorough=thorough)
    if not thorough or sum(each.num_bytes for each in expected.values()) < _MIN_BYTES_FOR_THREADS:
        return next(filter(None, map(compare, paths, expected.values())), None)
    with ThreadPoolExecutor(_THREADS) as threads:
        return next(filter(None, threads.map(compare, paths, expected.values())), None)


def write_synced(path: Path, content: bytes) -> None:
    """Writes a file and syncs it to disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Syncs a folder, so that a rename or a new file in it survives a power loss.

    Raises:
        OSError: The file system does not support it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_again(read: Callable[[], T]) -> T:
    """What `read` returns; it is retried, as storage that fails for a moment is not damage.

    Raises:
        OSError: It failed every time, or there is no such file.
    """
    for pause_s in _PAUSES_S:
        try:
            return read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
            raise
        except OSError:
            time.sleep(pause_s)
    return read()


def _synced_sum(path: Path) -> FileSum:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return _sum_of_file(file)


def _sum_of_file(file: Any, doing: str = "") -> FileSum:
    length, checksum = 0, 0
    while chunk := file.read(_CHUNK_BYTES):
        if doing:  # not in a save, which runs beside training: the stamps are training's
            progress.stamp(doing)
        length, checksum = length + len(chunk), crc32(chunk, checksum)
    return FileSum(length, f"{checksum:08x}")


def _damage(path: Path, expected: FileSum, *, thorough: bool) -> Damage | None:
    try:
        return read_again(partial(_difference, path, expected, thorough=thorough))
    except OSError as error:
        return Damage(path, f"{error.strerror}", f"{expected}")


def _difference(path: Path, expected: FileSum, *, thorough: bool) -> Damage | None:
    length = path.stat().st_size
    if length != expected.num_bytes:
        return Damage(path, f"{length:,} bytes", f"{expected.num_bytes:,} bytes")
    if not thorough:
        return None
    with path.open("rb") as file:
        found = _sum_of_file(file, f"reading {path}")
    return None if found == expected else Damage(path, f"{found}", f"{expected}")
