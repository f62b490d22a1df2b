"""What two processes are to do as two stages, as it stands on their command lines."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from jaxmorph.gpu_check.settings import Sizes
from jaxmorph.runtime.optimizer import OptimizerSettings

NUM_STAGES = 2
MICROBATCHES = 4
CLIP_NORM = 1.0

OPTIMIZER = OptimizerSettings(
    learning_rate=1e-2, warmup_steps=2, total_steps=20, weight_decay=0.1, epsilon=1e-2
)
"""AdamW divides a gradient by its own size. With an epsilon far below that an update is little more
than the gradient's sign: one of twice the size changes nothing, and one near zero, whose sign
rounding decides, changes much. Here most elements are below epsilon, so an update is about in
proportion to its gradient, and a parameter as far off as its gradients are. By CPU, where noise of
1e-6 of each gradient's largest element is added to all its elements in every step, as rounding
does, after 20 steps the worst parameter is off by 7e-5 of how far it has moved, with an epsilon of
1e-8 by a quarter of that."""


@dataclass(frozen=True)
class StageTask:
    """What each of the processes is told.

    Attributes:
        kind: "train": train some steps; "delay": time work and steps beside a slow link.
        joined: Whether JAX joins them, as it does the ranks of a run; else each has it for itself.
        sizes: Of the whole model, which is in float32 with the highest precision of products.
        num_steps: How many steps are trained, or timed with the delay and without.
        num_sends: How many messages are sent beside work, where they are.
        delay_ms: How late messages come then.
    """

    kind: Literal["train", "delay"]
    joined: bool
    sizes: Sizes
    num_steps: int
    num_sends: int = 0
    delay_ms: float = 0.0

    def to_word(self) -> str:
        """The word of a command line that `parse` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, word: str) -> "StageTask":
        """The task that `to_word` wrote."""
        fields = json.loads(word)
        return cls(**{**fields, "sizes": Sizes(**fields["sizes"])})


def batch_of(sizes: Sizes, step: int) -> tuple[np.ndarray, np.ndarray]:
    """A step's tokens and targets, the same wherever they are asked for.

    Some tokens are far more frequent than others, so that there is something to learn.

    Args:
        sizes: Of the model.
        step: The step.

    Returns:
        Two of int32 [microbatches, microbatch size, sequence].
    """
    shape = (MICROBATCHES, sizes.microbatch_size, sizes.sequence_length + 1)
    drawn = np.random.default_rng(step).random(shape) ** 4
    ids = (drawn * sizes.vocab_size).astype(np.int32)
    return ids[..., :-1], ids[..., 1:]
