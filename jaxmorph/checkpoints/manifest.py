"""A checkpoint's layout and manifest, and whether it is whole, to the last byte."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxmorph.checkpoints.checksums import (
    Damage,
    FileSum,
    find_damage,
    read_again,
    read_list,
    sum_of,
)
from jaxmorph.config import Config
from jaxmorph.data.tokens import DataDigest
from jaxmorph.errors import UserError

MANIFEST = "manifest.json"
SEAL = "manifest.seal"
DRAFT = "manifest.draft"
FORMAT = 3  # earlier formats had the shipped models' queries, keys and values in other orders
TiedPaths = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


def stage_path(checkpoint: Path, virtual_stage: int, replica: int = 0) -> Path:
    """A virtual stage's part of a checkpoint, as one replica writes it.

    Replicas other than 0 write only where each has a share of the optimizer's state.
    """
    of_replica = f"_replica_{replica}" if replica else ""
    return checkpoint / f"virtual_stage_{virtual_stage}{of_replica}"


def list_path(checkpoint: Path, virtual_stage: int, replica: int = 0) -> Path:
    """The list of the files in a virtual stage's part."""
    return stage_path(checkpoint, virtual_stage, replica).with_suffix(".files")


@dataclass(frozen=True)
class Manifest:
    """A checkpoint without its arrays.

    Attributes:
        step: The number of steps done, which is also the number of the next step and of its batch.
        layers: The layers of each virtual stage, in the order of the pipeline.
        tied: Pairs (path in the embedding's parameters, path in the head's) of tied parameters.
        config: The run's resolved configuration; all randomness follows from its seed.
        data: Identifies the text; None: not recorded.
        made_under: The plan in force, in words; empty: not recorded.
        link_states: The links that were not healthy, each in a few words.
        parts: The checksum of each part's list of files, in the order of `part_numbers`; None in a
            draft.
    """

    step: int
    layers: tuple[range, ...]
    vocab_size: int
    tied: TiedPaths
    config: Config
    data: DataDigest | None = None
    made_under: str = ""
    link_states: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[FileSum, ...] | None = None

    @property
    def is_of_script(self) -> bool:
        """Whether only a script knows the run's model; a user's data may lack a vocabulary too."""
        return self.vocab_size == 0 and self.config.data.factory is None

    @property
    def part_numbers(self) -> list[tuple[int, int]]:
        """The virtual stage of each part, and the replica that writes it."""
        replicas = range(self.config.num_optimizer_shares)
        return [(stage, replica) for replica in replicas for stage in range(len(self.layers))]

    def to_json(self) -> dict[str, Any]:
        """The manifest in JSON's types; `from_json` reads it back."""
        return {
            "format": FORMAT,
            "step": self.step,
            "data_position": self.step,
            "random_seed": self.config.run.seed,
            "layers": [[layers.start, layers.stop] for layers in self.layers],
            "vocab_size": self.vocab_size,
            "tied": [[list(embed), list(head)] for embed, head in self.tied],
            "data": None if self.data is None else asdict(self.data),
            "config": self.config.model_dump(mode="json"),
            "made_under": self.made_under,
            "link_states": dict(self.link_states),
            "parts": None if self.parts is None else [asdict(part) for part in self.parts],
        }

    @classmethod
    def from_json(cls, data: Any) -> "Manifest":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: It is something else, or has another version's format.
        """
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"got format {data['format']}, expected {FORMAT}")
            manifest = cls(
                step=int(data["step"]),
                layers=tuple(range(start, stop) for start, stop in data["layers"]),
                vocab_size=int(data["vocab_size"]),
                tied=tuple((tuple(embed), tuple(head)) for embed, head in data["tied"]),
                config=_config(data["config"]),
                data=DataDigest(**data["data"]) if data.get("data") else None,
                made_under=data.get("made_under", ""),
                link_states=data.get("link_states") or {},
                parts=_parts(data),
            )
            if manifest.parts and len(manifest.parts) != len(manifest.part_numbers):
                got, expected = len(manifest.parts), len(manifest.part_numbers)
                raise ValueError(f"got {got} parts, expected {expected}")
            return manifest
        except (KeyError, TypeError) as error:
            raise ValueError(f"got no manifest of a checkpoint: {error!r}") from error


def _config(data: Any) -> Config:
    # Earlier versions had other values of `intra_step`, which did not change the state.
    adaptation = {**data.get("adaptation", {}), "intra_step": "off"}
    return Config.model_validate({**data, "adaptation": adaptation})


def _parts(data: Any) -> tuple[FileSum, ...] | None:
    if data["parts"] is None:
        return None
    return tuple(FileSum(**part) for part in data["parts"])


_ALL_PARTS = slice(None)


def seal_of(manifest: bytes) -> bytes:
    """The content of a manifest's seal."""
    return f"{MANIFEST}: {sum_of(manifest)}\n".encode()


def damage_of(checkpoint: Path, *, thorough: bool, parts: slice = _ALL_PARTS) -> Damage | None:
    """Returns why a checkpoint isn't whole, or None if it is.

    Args:
        thorough: Read all files; otherwise compare only the lengths of the parts' files.
        parts: The parts to look at, by their index in `part_numbers`.

    Raises:
        UserError: The manifest is whole, but of another version.
    """
    path = checkpoint / MANIFEST
    try:
        content = read_again(path.read_bytes)
    except OSError as error:
        return Damage(path, f"{error.strerror}", "a checkpoint's manifest")
    if (damage := _damage_of_seal(checkpoint / SEAL, seal_of(content))) is not None:
        return damage
    try:
        manifest = Manifest.from_json(json.loads(content))
    except ValueError as error:  # the bytes are as they were written, by another version
        raise UserError(f"{path}: {' '.join(f'{error}'.split())}") from error
    if manifest.parts is None:
        return Damage(path, "no checksums", "those of each part")
    pairs = zip(manifest.part_numbers, manifest.parts, strict=True)
    for numbers, expected in list(pairs)[parts]:
        files, part = list_path(checkpoint, *numbers), stage_path(checkpoint, *numbers)
        damage = find_damage(checkpoint, {files.name: expected}, thorough=True)
        damage = damage or find_damage(
            part, read_list(read_again(files.read_bytes)), thorough=thorough
        )
        if damage is not None:
            return damage
    return None


def _damage_of_seal(path: Path, expected: bytes) -> Damage | None:
    try:
        got = read_again(path.read_bytes)
    except OSError as error:
        return Damage(path, f"{error.strerror}", repr(expected.decode()))
    if got != expected:
        return Damage(path, repr(got.decode(errors="replace")), repr(expected.decode()))
    return None
