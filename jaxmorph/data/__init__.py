"""The text that a run trains on: its tokens, and the batch of each step."""

from jaxmorph.data.batches import Batches, read_ahead
from jaxmorph.data.tokenizer import Tokenizer, open_tokenizer
from jaxmorph.data.tokens import Tokens, hold_out, is_token_array, load_tokens, separator_of

__all__ = [
    "Batches",
    "Tokenizer",
    "Tokens",
    "hold_out",
    "is_token_array",
    "load_tokens",
    "open_tokenizer",
    "read_ahead",
    "separator_of",
]
