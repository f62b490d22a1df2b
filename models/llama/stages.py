"""Llama as pure functions that a pipeline can cut."""

from ..in_pieces import ModelInPieces
from .config import LlamaConfig
from .model import Block, Embedding, Head


class Llama(ModelInPieces):
    """Llama as pure functions of dictionaries of parameters."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig):
        super().__init__(config, Embedding, Block, Head, tied=config.tied)
