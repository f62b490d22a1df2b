"""How a GPT-2 is cut for a pipeline, and where its weights come from and go to."""

from collections.abc import Iterable

from ..in_pieces import ModelInPieces, Params
from .config import GPT2Config
from .model import Block, Embedding, Head


class GPT2(ModelInPieces):
    """GPT-2 as pure functions of plain parameter dictionaries.

    Attributes:
      config: the sizes.
    """

    config: GPT2Config

    def __init__(self, config: GPT2Config):
        super().__init__(config, Embedding, Block, Head, tied=config.tied)

    def read_weights(self, path: str, layers: range, is_first: bool, is_last: bool) -> Params:
        """Returns a stage's parameters from Hugging Face's weights.

        Arguments, results and errors are those of `hugging_face.read_weights`.
        """
        from . import hugging_face  # and safetensors, which training has no need of

        return hugging_face.read_weights(self.config, path, layers, is_first, is_last)

    def write_weights(self, folder: str, stages: Iterable[tuple[range, Params]]) -> None:
        """Writes the model as Hugging Face's weights.

        Arguments and errors are those of `hugging_face.write_weights`.
        """
        from . import hugging_face

        hugging_face.write_weights(self.config, folder, stages)
