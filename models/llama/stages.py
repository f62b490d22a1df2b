"""How a Llama is cut for a pipeline."""

from ..in_pieces import ModelInPieces
from .config import LlamaConfig
from .model import Block, Embedding, Head


class Llama(ModelInPieces):
    """Llama as pure functions of plain parameter dictionaries.

    Attributes:
      config: the sizes.
    """

    config: LlamaConfig

    def __init__(self, config: LlamaConfig):
        super().__init__(config, Embedding, Block, Head, tied=config.tied)
