"""How a Llama is cut for a pipeline."""

from models.in_pieces import ModelInPieces
from models.llama.config import LlamaConfig
from models.llama.model import Block, Embedding, Head


class Llama(ModelInPieces):
    """Llama as pure functions of plain parameter dictionaries.

    Attributes:
      config: the sizes.
    """

    config: LlamaConfig

    def __init__(self, config: LlamaConfig):
        super().__init__(config, Embedding, Block, Head, tied=config.tied)
