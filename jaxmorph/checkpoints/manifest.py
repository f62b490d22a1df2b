"""What a checkpoint says of itself: a small JSON file at its root."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxmorph.checkpoints.checksums import FileSum
from jaxmorph.config import Config
from jaxmorph.data.digest import DataDigest

FORMAT = 2
_WITHOUT_CHECKSUMS = 1

TiedPaths = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint without its arrays.

    Attributes:
        step: How many steps have been done. The next one has this number, and so has its batch.
        layers: The layers of each virtual stage, in the order of the pipeline.
        vocab_size: The data's, which the model was built for.
        tied: Pairs (path in the embedding's parameters, path in the head's) of one parameter.
        config: The run's, resolved; its seed is where all randomness comes from.
        data: What it was trained on; None: not remembered.
        plan: What ran when it was saved, as `Plan.to_json`; None: not remembered.
        link_states: The links that weren't healthy then, each in a few words.
        parts: What the list of each virtual stage's files must be; None: it was made before there
            were such lists.
    """

    step: int
    layers: tuple[range, ...]
    vocab_size: int
    tied: TiedPaths
    config: Config
    data: DataDigest | None = None
    plan: Mapping[str, Any] | None = None
    link_states: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[FileSum, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """The manifest in JSON's types; `from_json` reads it back."""
        return {
            "format": _WITHOUT_CHECKSUMS if self.parts is None else FORMAT,
            "step": self.step,
            "data_position": self.step,
            "random_seed": self.config.run.seed,
            "layers": [[layers.start, layers.stop] for layers in self.layers],
            "vocab_size": self.vocab_size,
            "tied": [[list(embed), list(head)] for embed, head in self.tied],
            "data": None if self.data is None else asdict(self.data),
            "config": self.config.model_dump(mode="json"),
            "plan": self.plan,
            "link_states": dict(self.link_states),
            "parts": None if self.parts is None else [asdict(part) for part in self.parts],
        }

    @classmethod
    def from_json(cls, data: Any) -> "Manifest":
        """Reads what `to_json` wrote.

        Returns:
            The manifest.

        Raises:
            ValueError: It is something else, or of another version's format.
        """
        try:
            if data["format"] not in (_WITHOUT_CHECKSUMS, FORMAT):
                raise ValueError(f"got format {data['format']}, expected at most {FORMAT}")
            return cls(
                step=int(data["step"]),
                layers=tuple(range(start, stop) for start, stop in data["layers"]),
                vocab_size=int(data["vocab_size"]),
                tied=tuple((tuple(embed), tuple(head)) for embed, head in data["tied"]),
                config=Config.model_validate(data["config"]),
                data=DataDigest(**data["data"]) if data.get("data") else None,
                plan=data.get("plan"),
                link_states=data.get("link_states") or {},
                parts=_parts(data),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"got no manifest of a checkpoint: {error!r}") from error


def _parts(data: Any) -> tuple[FileSum, ...] | None:
    if data["format"] == _WITHOUT_CHECKSUMS:
        return None
    parts = tuple(FileSum(**part) for part in data["parts"])
    if len(parts) != len(data["layers"]):
        raise ValueError(f"got {len(parts)} parts, expected {len(data['layers'])}")
    return parts
