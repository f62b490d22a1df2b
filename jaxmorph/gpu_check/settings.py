"""What is measured, and how often."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxmorph.errors import UserError
from jaxmorph.gpu_check.copy_settings import COPIES_ON_CPU, COPIES_ON_GPU, CopySettings

if TYPE_CHECKING:
    from models.gpt2.stages import GPT2


@dataclass(frozen=True)
class Sizes:
    """The sizes of a GPT-2 stage and of a microbatch.

    Attributes:
        num_heads: Attention heads in each layer.
        vocab_size: Only of a stage that embeds or has the head.
    """

    width: int
    num_heads: int
    num_layers: int
    sequence_length: int
    microbatch_size: int
    vocab_size: int = 256

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers, width {self.width}, {self.num_heads} heads, "
            f"{self.microbatch_size} x {self.sequence_length} tokens"
        )


@dataclass(frozen=True)
class CheckSettings:
    """What every part is given.

    Attributes:
        stage: The stage whose speed and memory are looked at, in bfloat16.
        tiny: The model whose programs do next to nothing, so that dispatching them shows.
        parity: The model that is compared with the CPU, in float32.
        repeats: How often each program is timed.
        calls: How many calls of it one timing has.
        num_instruction_steps: How often the step of tiny programs is timed.
        num_training_steps: How many steps two stages train.
        num_delayed_steps: How many steps are timed on a slow link, and without the delay.
        num_sends: How many messages are sent over it beside work.
        copies: What is looked at of copies between device and slots.
        left_s: How long the processes may run that a part starts, whatever their own limit.
    """

    stage: Sizes
    tiny: Sizes
    parity: Sizes
    repeats: int
    calls: int
    num_instruction_steps: int
    num_training_steps: int
    num_delayed_steps: int
    num_sends: int
    delay_ms: float
    copies: CopySettings
    left_s: float = math.inf


_TINY = Sizes(16, 2, num_layers=2, sequence_length=8, microbatch_size=2, vocab_size=32)

ON_GPU = CheckSettings(
    stage=Sizes(2048, 16, num_layers=6, sequence_length=1024, microbatch_size=4),
    tiny=_TINY,
    parity=Sizes(512, 8, num_layers=4, sequence_length=256, microbatch_size=2, vocab_size=1024),
    repeats=15,
    calls=5,
    num_instruction_steps=20,
    num_training_steps=20,
    num_delayed_steps=20,
    num_sends=20,
    delay_ms=30.0,
    copies=COPIES_ON_GPU,
)
"""A quarter of the layers of GPT-2 medium, twice as wide: enough to keep a large GPU busy."""

ON_CPU = CheckSettings(
    stage=Sizes(64, 2, num_layers=2, sequence_length=32, microbatch_size=2),
    tiny=_TINY,
    parity=_TINY,
    repeats=3,
    calls=2,
    num_instruction_steps=3,
    num_training_steps=20,
    num_delayed_steps=3,
    num_sends=9,
    delay_ms=50.0,
    copies=COPIES_ON_CPU,
)
"""Enough to see that every part runs; the times mean nothing."""


def settings_for(device: Any) -> CheckSettings:
    """What is measured on a device of JAX."""
    return ON_CPU if device.platform == "cpu" else ON_GPU


def build_gpt2(sizes: Sizes, compute_dtype: str, attention: str = "auto") -> "GPT2":
    """The model that a stage is cut from.

    Args:
        compute_dtype: "float32" or "bfloat16".
        attention: What computes it, as the configuration's `model.attention`.

    Raises:
        UserError: If the models are not to be found.
    """
    try:
        from models.gpt2 import build
    except ModuleNotFoundError as error:
        if error.name not in ("models", "models.gpt2"):
            raise  # the model is there, but not something that it needs
        raise UserError(
            "got no module models.gpt2, which is part of the repository and not of the installed "
            "package; expected to be run from the repository's folder"
        ) from error
    return build(
        preset="tiny",
        sequence_length=sizes.sequence_length,
        vocab_size=sizes.vocab_size,
        compute_dtype=compute_dtype,
        width=sizes.width,
        num_heads=sizes.num_heads,
        num_layers=sizes.num_layers,
        attention=attention,
    )
