"""Llama: its presets, and the factory that a run's configuration names."""

from typing import TYPE_CHECKING, Any

from ..sizes import preset_sizes
from .config import PRESETS, LlamaConfig

if TYPE_CHECKING:
    from .model import Llama

__all__ = ["CHANGEABLE_OPTIONS", "PRESETS", "build"]

CHANGEABLE_OPTIONS = ("attention", "dropout", "sequence_parallel")
"""Options that say how to compute or to train, not which model it is."""


def build(
    *,
    preset: str,
    sequence_length: int,
    vocab_size: int,
    compute_dtype: str = "float32",
    **overrides: Any,
) -> "Llama":
    """Returns a Llama that can be cut into pipeline stages.

    Args:
      preset: a name in `PRESETS`.
      sequence_length: not used, because positions are rotations.
      vocab_size: of the tokenizer.
      compute_dtype: "float32" or "bfloat16".
      **overrides: width, num_layers, num_heads, num_key_value_heads, hidden_width, rotary_base and
        tied, in place of the preset's; attention: "auto", "xla" or "cudnn"; dropout, from 0 to
        below 1; and sequence_parallel.

    Raises:
      ValueError: an unknown preset or override, or sizes that do not fit each other.
    """
    sizes = preset_sizes(PRESETS, preset, LlamaConfig, overrides)
    config = LlamaConfig(vocab_size, compute_dtype=compute_dtype, **sizes)
    # Imported here so that the sizes are available without JAX, whose import takes a second.
    from .model import Llama

    return Llama(config)
