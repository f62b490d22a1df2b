"""What two processes are to do as two stages, as it stands on their command lines."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from jaxmorph.gpu_check.settings import Sizes
from jaxmorph.runtime.optimizer import OptimizerSettings

NUM_STAGES = 2
MICROBATCHES = 4
CLIP_NORM = 1.0

_RATE = 0.04  # 1e-2 for the small model of a CPU, 2e-3 for that of a GPU


def optimizer_of(sizes: Sizes) -> OptimizerSettings:
    """AdamW by which rounding stays rounding: noise isn't made larger from step to step.

    It divides a gradient by its own size. With an epsilon far below that an update is little more
    than the gradient's sign: one of twice the size changes nothing, and one near zero, whose sign
    rounding decides, changes much. Here most elements are below epsilon, so an update is about in
    proportion to its gradient, and a parameter as far off as its gradients are. And a wide model
    takes smaller steps: with 1e-2 at a width of 512 the gradients' norm jumps from step to step,
    and of noise 7e-6 is left of it. By CPU, where noise of 1e-6 of each gradient's largest element
    is added to all its elements in every step, as rounding does, after 20 steps the worst parameter
    of the model for GPUs is off by 5e-5 of how far it has moved, and no norm by more than 3e-7;
    with an epsilon of 1e-8 that of the small one is off by a quarter.
    """
    return OptimizerSettings(
        learning_rate=_RATE / math.sqrt(sizes.width),
        warmup_steps=2,
        total_steps=20,
        weight_decay=0.1,
        epsilon=1e-2,
    )


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

    Returns:
        Two of int32 [microbatches, microbatch size, sequence].
    """
    shape = (MICROBATCHES, sizes.microbatch_size, sizes.sequence_length + 1)
    drawn = np.random.default_rng(step).random(shape) ** 4
    ids = (drawn * sizes.vocab_size).astype(np.int32)
    return ids[..., :-1], ids[..., 1:]
