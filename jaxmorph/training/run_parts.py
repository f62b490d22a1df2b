"""Loads a run's model and data, and reads a step's data for a rank."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from jaxmorph.config import Config
from jaxmorph.config.sections import SHIPPED_MODELS
from jaxmorph.data import Batches, hold_out, load_tokens, separator_of
from jaxmorph.data.tokens import DataDigest, digest_of
from jaxmorph.errors import UserError, in_users_code
from jaxmorph.placement import ALONE, Replica
from jaxmorph.progress import progress
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.rank_process import in_one_line
from jaxmorph.runtime.rendezvous import Rendezvous, gather, raised_together
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.stage.activations import boundary_of
from jaxmorph.stage.model import MicrobatchShapes, PipelineModel, Tree, count_targets, takes_extras
from jaxmorph.stage.model_checks import check_model
from jaxmorph.stage.model_flops import DeviceWork
from jaxmorph.stage.parameters import check_weights
from jaxmorph.stage.shard_checks import check_shards
from jaxmorph.stage.sharding import partition_specs
from jaxmorph.training.evaluation import held_out_batches
from jaxmorph.training.model_factory import build_model
from jaxmorph.training.own_data import StepData, load_own_data

_log = logging.getLogger(__name__)


def device_work(
    config: Config, model: PipelineModel, microbatch: MicrobatchShapes
) -> DeviceWork | None:
    """What each device computes in a step; None where ops take emulated times, or lengths vary."""
    if config.emulation.accelerator is not None or microbatch.shorter:
        return None
    num_devices = config.parallelism.num_ranks * config.parallelism.tensor
    try:
        return DeviceWork.of(model, microbatch, config.batch.microbatches, num_devices)
    except Exception as error:  # such as of operations new to JAX; training continues
        _log.warning("the model's FLOPs can't be counted: %s", in_one_line(error))
        return None


@dataclass(frozen=True)
class RunParts:
    """A run's model and data, checked against each other.

    Attributes:
        held_out: The batches to evaluate, if any.
        longest_step: A step of the longest length.
        source: Where the data come from, in words.
        data: Identifies the data when the run resumes.
    """

    model: PipelineModel
    batches: StepData
    held_out: StepData | None
    shapes: MicrobatchShapes
    longest_step: int
    source: str
    vocab_size: int
    data: DataDigest

    def microbatch(self) -> MicrobatchShapes:
        """Arrays of a microbatch of the longest step."""
        step, of = self.longest_step, self.batches
        trees = of.inputs(step), of.targets(step), dict(of.extras(step))
        return MicrobatchShapes(*jax.tree.map(lambda array: array[0], trees))


def load_parts(config: Config) -> RunParts:
    """Load a configuration's model and data.

    Raises:
        UserError: They can't be loaded, or don't fit each other or the stages.
    """
    cut = config.parallelism
    longest_step = 0
    if config.data.factory is None:
        batches, held_out, source, vocab_size, digest = _text_of(config)
        first = (batches.inputs(0), batches.targets(0), batches.extras(0))
        shapes = MicrobatchShapes.of_step(*first)
    else:
        batches, held_out, vocab_size, digest = load_own_data(config)
        shapes, longest_step = batches.shapes, batches.first_steps[0]
        lengths = len(shapes.lengths)
        source = f"data of {config.data.factory}" + f", in {lengths} lengths" * (lengths > 1)
    model = build_model(config, vocab_size)
    if config.model.weights is not None:
        check_weights(model, config.model.weights)
    if config.data.is_packed and not takes_extras(model.layer):
        raise UserError(
            f"data.packing: got segments, expected none: the layer of model.factory, "
            f"{config.model.factory}, takes no extras"
        )
    cut_layers(model.num_layers, cut.stages, cut.layers, cut.chunks)  # raises if they don't fit
    partition_specs(model, cut.tensor)  # likewise
    return RunParts(model, batches, held_out, shapes, longest_step, source, vocab_size, digest)


def require_same_data(config: Config, rendezvous: Rendezvous, data: DataDigest) -> None:
    """Require the same data on all ranks: one rank reads the inputs, another the targets.

    Raises:
        UserError: The data differ; raised on all ranks.
    """
    found = gather(rendezvous, DataDigest, data)
    other = next((rank for rank, each in enumerate(found) if each != found[0]), 0)
    if not other:
        return
    if config.data.factory is not None:
        raise UserError(
            f"data.factory: {config.data.factory}: got other data, or another module, on rank "
            f"{other} than on rank 0, expected the same on every rank (compared by an attribute "
            "`digest` of what build_data returns, or else by the module's source)"
        )
    got, expected = found[other].num_tokens, found[0].num_tokens
    counts = "" if got == expected else f" ({got:,}, rank 0 has {expected:,})"
    raise UserError(
        f"data: got other tokens on rank {other} than on rank 0{counts}, expected the same on "
        "every rank (data.path, data.tokenizer)"
    )


def check_together(
    config: Config,
    rendezvous: Rendezvous,
    model: PipelineModel,
    shapes: MicrobatchShapes,
    microbatch: Callable[[], MicrobatchShapes] | None = None,
) -> tuple[str, ...]:
    """Check a model once the ranks have joined; returns the parameters that no gradient reaches.

    What a model does may depend on its device, so nothing is traced before. Only the last rank
    checks: others may share its host. jaxmorph's own models are not checked on text: its tests do
    that, and with a large vocabulary it takes seconds.

    Args:
        microbatch: Returns the arrays of one; None for a script, whose batches come later.

    Raises:
        UserError: The model would be trained wrongly; raised on all ranks.
    """
    unreached: tuple[str, ...] = ()
    with raised_together(rendezvous), in_users_code("embed with split parameters", model.embed):
        for index in range(len(shapes.lengths)) if config.parallelism.tensor > 1 else ():
            boundary_of(model, shapes, index, config.parallelism.tensor)
    if _is_jaxmorphs_own(model) and _is_text(shapes.inputs):
        return unreached
    within = progress.within(config.timeouts.compile_s, "checks the model")
    with within, raised_together(rendezvous):
        if rendezvous.rank == rendezvous.num_ranks - 1:
            unreached = check_model(model, shapes, None if microbatch is None else microbatch())
            check_shards(model, config.parallelism.tensor, shapes)
    return gather(rendezvous, tuple[str, ...], unreached)[-1]


def unreached_in_words(names: Sequence[str]) -> str:
    """A warning of parameters that no gradient reaches; "" without any."""
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    listed = ", ".join(names[:_MOST_NAMES])
    return f"no gradient reaches {listed}{more}: not trained, but for weight decay"


_MOST_NAMES = 8
_OWN_MODELS = {f"jaxmorph.models.{name}.model" for name in SHIPPED_MODELS}


def _is_jaxmorphs_own(model: PipelineModel) -> bool:
    functions = model.embed, model.layer, model.head
    are_own = all(each.__module__ == "jaxmorph.models.in_pieces" for each in functions)
    return are_own and type(model).__module__ in _OWN_MODELS


def _is_text(inputs: Tree) -> bool:
    """Whether inputs are tokens, or tokens of packed documents and their positions."""
    arrays = jax.tree.leaves(inputs)
    return len(arrays) <= 2 and all((len(a.shape), a.dtype.name) == (2, "int32") for a in arrays)


def _text_of(config: Config) -> tuple[Batches, Batches | None, str, int, DataDigest]:
    """The text's batches, its held-out batches, source, vocabulary size and digest."""
    data, batch = config.data, config.batch
    whole = load_tokens(data.path, data.tokenizer, data.token_dtype, data.vocab_size)
    tokens, held_out = hold_out(whole, data.held_out_fraction)
    separator = separator_of(data.path, data.tokenizer) if data.is_packed else None
    batches = Batches(
        tokens,
        microbatches=batch.microbatches,
        microbatch_size=batch.microbatch_size,
        sequence_length=data.sequence_length,
        seed=config.run.seed,
        separator=separator,
    )
    held_out = held_out_batches(config, held_out, separator)
    source = tokens.source + f", packed: token {separator} ends a document" * data.is_packed
    return batches, held_out, source, tokens.vocab_size, digest_of(whole.ids)


def step_reader(
    config: Config,
    batches: StepData,
    rank: int,
    stage: StageTrainer,
    replica: Replica = ALONE,
) -> Callable[[int], StepInputs]:
    """A function that returns what the rank's stage reads of the data of a step.

    Args:
        rank: The rank's number in its replica.
    """
    placement = config.placement
    is_first, is_last = rank == placement.first.rank, rank == placement.last.rank

    def read(step: int) -> StepInputs:
        targets = batches.targets(step) if is_last else None
        found = StepInputs(
            inputs=batches.inputs(step) if is_first else None,
            targets=targets,
            loss_weight=1.0 / max(count_targets(targets), 1),
            extras=batches.extras(step) if stage.reads_extras else {},
            length_index=batches.length_index(step),
        )
        return found.of_replica(replica)

    return read
