"""A batch of the user's, cut into the microbatches of a step."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.runtime.executor import StepInputs


def cut_batch(batch: Sequence[Any], config: Config, rank: int) -> StepInputs:
    """What one rank feeds into a step: tokens on the first stage, targets on the last.

    Args:
        batch: Tokens and targets, whole numbers [batch, sequence] each, or already cut:
            [microbatches, microbatch size, sequence]. Targets below 0 don't count.
        config: The run, whose sizes they must have.

    Returns:
        The microbatches, int32; the loss is the mean over the targets that count.

    Raises:
        UserError: If a batch is no such pair.
    """
    try:
        tokens, targets = batch
    except (TypeError, ValueError) as error:
        got = type(batch).__name__
        raise UserError(f"batch: got {got}, expected a pair of tokens and targets") from error
    tokens, targets = (
        _microbatches("tokens", tokens, config),
        _microbatches("targets", targets, config),
    )
    is_last = rank == config.parallelism.stages - 1
    return StepInputs(
        tokens=tokens if rank == 0 else None,
        targets=targets if is_last else None,
        loss_weight=1.0 / max(1, np.count_nonzero(targets >= 0)),
    )


def _microbatches(name: str, values: Any, config: Config) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise UserError(f"batch: got {name} of {array.dtype}, expected whole numbers")
    sizes, length = config.batch, config.data.sequence_length
    cut = (sizes.microbatches, sizes.microbatch_size, length)
    whole = (sizes.microbatches * sizes.microbatch_size, length)
    if array.shape not in (whole, cut):
        raise UserError(
            f"batch: got {name} of shape {list(array.shape)}, expected {list(whole)}: "
            "batch.microbatches times batch.microbatch_size, and data.sequence_length"
        )
    return array.astype(np.int32).reshape(cut)
