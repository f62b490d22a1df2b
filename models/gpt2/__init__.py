"""GPT-2: its presets, and the factory that a run's configuration names."""

from typing import TYPE_CHECKING, Any

from ..sizes import preset_sizes
from .config import PRESETS, GPT2Config

if TYPE_CHECKING:
    from .model import GPT2

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
) -> "GPT2":
    """Returns a GPT-2 that can be cut into pipeline stages.

    Args:
      preset: a name in `PRESETS`.
      sequence_length: the number of learned positions.
      vocab_size: of the tokenizer.
      compute_dtype: "float32" or "bfloat16".
      **overrides: width, num_layers, num_heads and tied, in place of the preset's; attention:
        "auto", "xla" or "cudnn"; dropout, from 0 to below 1; and sequence_parallel.

    Raises:
      ValueError: an unknown preset or override, or sizes that do not fit each other.
    """
    sizes = preset_sizes(PRESETS, preset, GPT2Config, overrides)
    config = GPT2Config(vocab_size, sequence_length, compute_dtype=compute_dtype, **sizes)
    # Imported here so that the sizes are available without JAX, whose import takes a second.
    from .model import GPT2

    return GPT2(config)
