"""What a checkpoint says of itself: a small JSON file at its root."""

from dataclasses import asdict, dataclass
from typing import Any

from jaxmorph.config import Config
from jaxmorph.data.digest import DataDigest

MANIFEST = "manifest.json"
FORMAT = 1

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
    """

    step: int
    layers: tuple[range, ...]
    vocab_size: int
    tied: TiedPaths
    config: Config
    data: DataDigest | None = None

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
        }

    @classmethod
    def from_json(cls, data: Any) -> "Manifest":
        """Reads what `to_json` wrote.

        Args:
            data: JSON.

        Returns:
            The manifest.

        Raises:
            ValueError: It is something else, or of another version's format.
        """
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"got format {data['format']}, expected {FORMAT}")
            return cls(
                step=int(data["step"]),
                layers=tuple(range(start, stop) for start, stop in data["layers"]),
                vocab_size=int(data["vocab_size"]),
                tied=tuple((tuple(embed), tuple(head)) for embed, head in data["tied"]),
                config=Config.model_validate(data["config"]),
                data=DataDigest(**data["data"]) if data.get("data") else None,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"got no manifest of a checkpoint: {error!r}") from error
