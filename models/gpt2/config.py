"""The sizes of a GPT-2, and the presets; imports no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..sizes import check_counts, check_multiple, check_options


@dataclass(frozen=True)
class GPT2Config:
    """The sizes of one GPT-2.

    Attributes:
      sequence_length: the number of learned positions, the longest sequence.
      width: of the residual stream; a multiple of `num_heads`.
      num_layers: blocks of attention and MLP.
      tied: whether the token embedding is also the output projection.
      compute_dtype: of activations and matrix products; parameters are always float32.
      attention: "xla", "cudnn", or "auto": cuDNN if the device has it.
      dropout: the share of the embedding's output, and of what each branch adds to the residual
        stream, that a training step sets to zero.
      sequence_parallel: whether each device of a stage has a part of the sequence between products,
        instead of the whole.
    """

    vocab_size: int
    sequence_length: int
    width: int
    num_layers: int
    num_heads: int
    tied: bool = True
    compute_dtype: str = "float32"
    attention: str = "auto"
    dropout: float = 0.0
    sequence_parallel: bool = False

    def __post_init__(self):
        check_counts(self, ("vocab_size", "sequence_length", "width", "num_layers", "num_heads"))
        check_multiple(self, "width", "num_heads")
        check_options(self)


PRESETS: Mapping[str, Mapping[str, int]] = {
    "tiny": {"width": 128, "num_layers": 8, "num_heads": 4},
    "mini": {"width": 256, "num_layers": 8, "num_heads": 8},
    "small": {"width": 512, "num_layers": 8, "num_heads": 8},
    "124M": {"width": 768, "num_layers": 12, "num_heads": 12},
    "355M": {"width": 1024, "num_layers": 24, "num_heads": 16},
    "774M": {"width": 1280, "num_layers": 36, "num_heads": 20},
    "1.5B": {"width": 1600, "num_layers": 48, "num_heads": 25},
    "7B": {"width": 5120, "num_layers": 22, "num_heads": 40},
    "14B": {"width": 5120, "num_layers": 46, "num_heads": 40},
    "30B": {"width": 8192, "num_layers": 38, "num_heads": 64},
    "60B": {"width": 11264, "num_layers": 38, "num_heads": 88},
    "140B": {"width": 12288, "num_layers": 78, "num_heads": 96},
}
"""Three sizes for demos, GPT-2's four, and the PipeMorph paper's five, with heads of 128.

The vocabulary is the tokenizer's, and is not padded. (With GPT-2's own of 50,257 and 1,024
positions, 124M has exactly 124,439,808 parameters.)
"""
