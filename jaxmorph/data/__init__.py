"""The text a run trains on: its tokens, and the batch of each step."""

from jaxmorph.data.batches import Batch, Batches, ReadAhead
from jaxmorph.data.tokens import Tokens, load_tokens

__all__ = ["Batch", "Batches", "ReadAhead", "Tokens", "load_tokens"]
