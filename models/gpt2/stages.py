"""GPT-2 as pure functions that a pipeline can cut, with Hugging Face's weights."""

from collections.abc import Iterable

from ..in_pieces import ModelInPieces, Params
from .config import GPT2Config
from .model import Block, Embedding, Head


class GPT2(ModelInPieces):
    """GPT-2 as pure functions of dictionaries of parameters."""

    config: GPT2Config

    def __init__(self, config: GPT2Config):
        super().__init__(config, Embedding, Block, Head, tied=config.tied)

    def read_weights(self, path: str, layers: range, is_first: bool, is_last: bool) -> Params:
        """Returns a stage's parameters: see `hugging_face.read_weights`."""
        from . import hugging_face  # imports safetensors, which training doesn't need

        return hugging_face.read_weights(self.config, path, layers, is_first, is_last)

    def write_weights(self, folder: str, stages: Iterable[tuple[range, Params]]) -> None:
        """Writes the model: see `hugging_face.write_weights`."""
        from . import hugging_face

        hugging_face.write_weights(self.config, folder, stages)
