"""The sizes of a Llama, and the presets; imports no JAX."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..sizes import check_counts, check_multiple, check_options

_COUNTS = (
    "vocab_size",
    "width",
    "num_layers",
    "num_heads",
    "num_key_value_heads",
    "hidden_width",
)


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of one Llama.

    Attributes:
      width: of the residual stream; an even multiple of `num_heads`.
      num_layers: blocks of attention and MLP.
      num_heads: heads of queries in each block; a multiple of `num_key_value_heads`.
      num_key_value_heads: heads of keys and values, each shared by a group of query heads.
      hidden_width: of the MLP.
      rotary_base: position t rotates the first pair of a head by t, the last by almost t / base.
      tied: whether the token embedding is also the output projection.
      compute_dtype: of activations and matrix products; parameters are always float32.
      attention: "xla", "cudnn", or "auto": cuDNN if the device has it.
      dropout: the share of the embedding's output, and of what each branch adds to the residual
        stream, that a training step sets to zero.
      sequence_parallel: whether each device of a stage has a part of the sequence between products,
        instead of the whole.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    hidden_width: int
    rotary_base: float = 10_000.0
    tied: bool = False
    compute_dtype: str = "float32"
    attention: str = "auto"
    dropout: float = 0.0
    sequence_parallel: bool = False

    def __post_init__(self):
        check_counts(self, _COUNTS)
        check_multiple(self, "width", "num_heads")
        check_multiple(self, "num_heads", "num_key_value_heads")
        if self.head_width % 2:
            raise ValueError(
                f"width: got {self.width}, expected heads of an even width: "
                f"num_heads={self.num_heads} has {self.head_width}"
            )
        _check_base(self.rotary_base)
        check_options(self)

    @property
    def head_width(self) -> int:
        """The width of one head."""
        return self.width // self.num_heads

    @property
    def heads_in_group(self) -> int:
        """How many heads of queries share keys and values."""
        return self.num_heads // self.num_key_value_heads

    @property
    def key_value_width(self) -> int:
        """The width of all keys of one position, and of all values."""
        return self.num_key_value_heads * self.head_width


def _sizes(
    width: int, num_layers: int, num_heads: int, num_key_value_heads: int, hidden_width: int
) -> dict[str, Any]:
    return {
        "width": width,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
        "hidden_width": hidden_width,
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": _sizes(128, 8, 4, 2, 384),
    "mini": _sizes(256, 8, 8, 2, 704),
    "small": _sizes(512, 8, 8, 4, 1408),
    "1.1B": _sizes(2048, 22, 32, 4, 5632),
    "7B": _sizes(4096, 32, 32, 32, 11008),
    "8B": _sizes(4096, 32, 32, 8, 14336) | {"rotary_base": 500_000.0},
    "13B": _sizes(5120, 40, 40, 40, 13824),
    "70B": _sizes(8192, 80, 64, 8, 28672),
}
"""Three sizes for demos, TinyLlama's 1.1B, Llama 2's 7B, 13B and 70B, and Llama 3's 8B.

The vocabulary is the tokenizer's, and is not padded. (Llama 2 and TinyLlama have 32,000 tokens,
Llama 3 128,256.)
"""


def _check_base(base: Any) -> None:
    is_number = isinstance(base, int | float) and not isinstance(base, bool)
    if not is_number or not math.isfinite(base) or base <= 1:
        raise ValueError(f"rotary_base: got {base!r}, expected a number above 1")
