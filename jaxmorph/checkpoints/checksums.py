"""Checksums of a checkpoint's files: made by whoever wrote them, compared before they are read.

Each part has a list of its files beside it, `virtual_stage_K.files`, the manifest has the checksum
of each list, and `manifest.seal` that of the manifest. So there is no byte of a checkpoint that can
change, and no file that can go, without one of them saying so. They are CRC-32s, with lengths: they
tell of what disks, memory and interrupted copies do to files, not of anybody's intent.
"""

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

_CHUNK_BYTES = 1 << 22
_THREADS = 4  # reading and `crc32` hold no lock of Python's
_WORTH_THREADS_BYTES = 1 << 24


@dataclass(frozen=True)
class FileSum:
    """What a file must be.

    Attributes:
        crc32: Its checksum, eight hexadecimal digits.
    """

    num_bytes: int
    crc32: str

    def __str__(self) -> str:
        return f"{self.num_bytes:,} bytes of CRC-32 {self.crc32}"


@dataclass(frozen=True)
class Damage:
    """Why a checkpoint is not whole.

    Attributes:
        file: The file that says so.
    """

    file: Path
    got: str
    expected: str

    def __str__(self) -> str:
        return f"{self.file}: got {self.got}, expected {self.expected}"


def sum_of(content: bytes) -> FileSum:
    """What a file of this content must be."""
    return FileSum(len(content), f"{crc32(content):08x}")


def list_files(folder: Path) -> bytes:
    """The list of all files in a folder with their checksums, once they are all on the disk.

    Returns:
        A JSON object from paths, relative to the folder, to `FileSum`s.
    """
    sums = {f"{path.relative_to(folder)}": asdict(_settled(path)) for path in _files(folder)}
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        with suppress(OSError):  # not every file system can, and the files are there
            sync_folder(inner)
    return json.dumps(sums, indent=1).encode()


def read_list(content: bytes) -> dict[str, FileSum]:
    """Reads what `list_files` made."""
    try:
        return {name: FileSum(**told) for name, told in json.loads(content).items()}
    except (TypeError, AttributeError) as error:
        raise ValueError(f"got no list of files: {error!r}") from error


def find_damage(folder: Path, expected: Mapping[str, FileSum], *, thorough: bool) -> Damage | None:
    """The first file that isn't what it must be; None: all are.

    Args:
        thorough: Whether to read them; else only their lengths are compared.
    """
    paths = [folder / name for name in expected]
    compare = partial(_compared, thorough=thorough)
    if not thorough or sum(each.num_bytes for each in expected.values()) < _WORTH_THREADS_BYTES:
        return next(filter(None, map(compare, paths, expected.values())), None)
    with ThreadPoolExecutor(_THREADS) as threads:
        return next(filter(None, threads.map(compare, paths, expected.values())), None)


def write_settled(path: Path, content: bytes) -> None:
    """Write a file, and have it on the disk before this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have a renaming in a folder, or a new file's name, outlive a loss of power.

    Raises:
        OSError: The file system can't do that.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _settled(path: Path) -> FileSum:
    """The sum of a file, which outlives a loss of power from then on."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return _sum_of_file(file)


def _sum_of_file(file: Any) -> FileSum:
    length, checksum = 0, 0
    while chunk := file.read(_CHUNK_BYTES):
        length, checksum = length + len(chunk), crc32(chunk, checksum)
    return FileSum(length, f"{checksum:08x}")


def _compared(path: Path, expected: FileSum, *, thorough: bool) -> Damage | None:
    try:
        length = path.stat().st_size
        if length != expected.num_bytes:
            return Damage(path, f"{length:,} bytes", f"{expected.num_bytes:,} bytes")
        if not thorough:
            return None
        with path.open("rb") as file:
            found = _sum_of_file(file)
    except OSError as error:
        return Damage(path, f"{error.strerror}", f"{expected}")
    return None if found == expected else Damage(path, f"{found}", f"{expected}")
