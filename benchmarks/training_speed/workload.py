"""What every contender trains; imports neither JAX nor torch."""

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

VOCAB_SIZE = 256
_TEXT_BYTES = 1 << 21


@dataclass(frozen=True)
class Workload:
    """A GPT-2 on bytes, its batch and its optimizer: AdamW at a constant rate, clipped.

    The embedding is not tied to the head, which torch's pipelines have no means for.
    """

    width: int = 256
    num_layers: int = 8
    num_heads: int = 4
    sequence_length: int = 128
    microbatches: int = 8
    microbatch_size: int = 2
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float = 1.0

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a step predicts."""
        return self.microbatches * self.microbatch_size * self.sequence_length

    def to_text(self) -> str:
        """One word of a command line, which `from_text` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Workload":
        """The workload that `to_text` wrote."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return (
            f"GPT-2 of {self.num_layers} layers, width {self.width}, float32; {self.microbatches} "
            f"microbatches of {self.microbatch_size} x {self.sequence_length} bytes"
        )


Batch = tuple[np.ndarray, np.ndarray]
"""Tokens and targets, int32 [microbatches, microbatch_size, sequence_length] each."""


def write_batches(path: Path, workload: Workload, num_steps: int) -> None:
    """Write the batches of all steps: windows of the sources of Python's standard library."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)[:_TEXT_BYTES]
    symbols, length = np.frombuffer(text, np.uint8), workload.sequence_length
    shape = (num_steps, workload.microbatches, workload.microbatch_size)
    starts = np.random.default_rng(0).integers(symbols.size - length - 1, size=shape)
    windows = starts[..., None] + np.arange(length + 1)
    np.save(path, symbols[windows].astype(np.int32))


def read_batches(path: Path) -> Iterator[Batch]:
    """The batches in order."""
    for windows in np.load(path):
        yield np.ascontiguousarray(windows[..., :-1]), np.ascontiguousarray(windows[..., 1:])
