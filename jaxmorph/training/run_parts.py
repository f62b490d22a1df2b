"""Loads a run's model and data, and reads a step's data for a rank."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxmorph.config import Config
from jaxmorph.data import Batches, hold_out, load_tokens
from jaxmorph.data.tokens import DataDigest, digest_of
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.stage.model import PipelineModel, cut_layers
from jaxmorph.stage.parameters import check_weights
from jaxmorph.training.evaluation import held_out_batches
from jaxmorph.training.model_factory import build_model


@dataclass(frozen=True)
class RunParts:
    """A run's model and data, checked against each other.

    Attributes:
        held_out: The batches to evaluate, if any.
        source: Where the data come from, in words.
        data: Identifies the data when the run resumes.
    """

    model: PipelineModel
    batches: Batches
    held_out: Batches | None
    source: str
    vocab_size: int
    data: DataDigest


def load_parts(config: Config) -> RunParts:
    """Load a configuration's model and data.

    Raises:
        UserError: They can't be loaded, or don't fit each other or the stages.
    """
    data, batch, cut = config.data, config.batch, config.parallelism
    whole = load_tokens(data.path, data.tokenizer, data.token_dtype, data.vocab_size)
    tokens, held_out = hold_out(whole, data.held_out_fraction)
    model = build_model(config, tokens.vocab_size)
    if config.model.weights is not None:
        check_weights(model, config.model.weights)
    batches = Batches(
        tokens,
        microbatches=batch.microbatches,
        microbatch_size=batch.microbatch_size,
        sequence_length=data.sequence_length,
        seed=config.run.seed,
    )
    cut_layers(model.num_layers, cut.stages, cut.layers, cut.chunks)  # raises if they don't fit
    held_out = held_out_batches(config, held_out)
    data_digest = digest_of(whole.ids)
    return RunParts(model, batches, held_out, tokens.source, tokens.vocab_size, data_digest)


def step_reader(config: Config, batches: Batches, rank: int) -> Callable[[int], StepInputs]:
    """A function from a step's number to a rank's inputs: tokens, targets, or neither."""
    is_last = rank == config.parallelism.stages - 1

    def read(step: int) -> StepInputs:
        targets = batches.targets(step) if is_last else None
        counted = 1 if targets is None else int(np.count_nonzero(targets >= 0))
        return StepInputs(
            tokens=batches.inputs(step) if rank == 0 else None,
            targets=targets,
            loss_weight=1.0 / max(counted, 1),
        )

    return read
