"""Whether a checkpoint is whole: its manifest, its parts, and every byte of their files."""

import json
from collections.abc import Iterator
from pathlib import Path

from jaxmorph.checkpoints.checksums import Damage, FileSum, find_damage, read_list, sum_of
from jaxmorph.checkpoints.layout import MANIFEST, SEAL, list_path, stage_path
from jaxmorph.checkpoints.manifest import Manifest
from jaxmorph.errors import UserError


def seal_of(manifest: bytes) -> bytes:
    """What the seal of a manifest says."""
    return f"{MANIFEST}: {sum_of(manifest)}\n".encode()


def damage_of(checkpoint: Path, *, thorough: bool) -> Damage | None:
    """Why a checkpoint isn't whole; None: it is.

    One that was made before there were checksums is whole if all of its parts are there.

    Args:
        thorough: Whether to read all files; else only the lengths of parts' files are compared.

    Raises:
        UserError: Its manifest is whole, but another version's.
    """
    return next(_damages(checkpoint, thorough=thorough), None)


def _damages(checkpoint: Path, *, thorough: bool) -> Iterator[Damage]:
    """What is wrong with a checkpoint; after the first, nothing more can be believed."""
    path = checkpoint / MANIFEST
    try:
        told = path.read_bytes()
    except OSError as error:
        yield Damage(path, f"{error.strerror}", "a checkpoint's manifest")
        return
    is_sealed = (checkpoint / SEAL).exists()
    if is_sealed:
        yield from _of_file(checkpoint / SEAL, seal_of(told))
    try:
        manifest = Manifest.from_json(json.loads(told))
    except ValueError as error:
        why = " ".join(f"{error}".split())
        if is_sealed:
            raise UserError(f"{path}: {why}") from error
        yield Damage(path, why, "a checkpoint's manifest")
        return
    yield from _of_parts(checkpoint, manifest, thorough=thorough)
    if manifest.parts is not None and not is_sealed:
        yield Damage(checkpoint / SEAL, "nothing", repr(seal_of(told).decode()))


def _of_file(path: Path, expected: bytes) -> Iterator[Damage]:
    try:
        got = path.read_bytes()
    except OSError as error:
        yield Damage(path, f"{error.strerror}", repr(expected.decode()))
        return
    if got != expected:
        yield Damage(path, repr(got.decode(errors="replace")), repr(expected.decode()))


def _of_parts(checkpoint: Path, manifest: Manifest, *, thorough: bool) -> Iterator[Damage]:
    for number in range(len(manifest.layers)):
        part = stage_path(checkpoint, number)
        if manifest.parts is not None:
            files = list_path(checkpoint, number)
            yield from _of_listed(files, manifest.parts[number], part, thorough=thorough)
        elif not part.is_dir():
            yield Damage(part, "nothing", "a part of the checkpoint")


def _of_listed(path: Path, expected: FileSum, part: Path, *, thorough: bool) -> Iterator[Damage]:
    """A list of a part's files, and the files that it has."""
    damage = find_damage(path.parent, {path.name: expected}, thorough=True)
    damage = damage or find_damage(part, read_list(path.read_bytes()), thorough=thorough)
    if damage is not None:
        yield damage
