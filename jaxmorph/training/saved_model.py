"""Loads a run's model from a checkpoint into one process, and samples from it."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.manifest import damage_of, stage_path
from jaxmorph.checkpoints.tree_files import TreeFiles
from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.runtime.stage_state import PARAMS
from jaxmorph.stage.model import GivesLogits, Params, PipelineModel, model_logits
from jaxmorph.training.model_factory import build_model, without_changeable_options
from jaxmorph.training.resume import require_known_model, saved_run

_SEEDS = 2**32


@dataclass(frozen=True)
class SavedModel:
    """A model with its parameters.

    Attributes:
        config: The run's, at the time of the save.
        model: Without options for a certain device.
        stages: The layers and parameters of each virtual stage, float32 numpy arrays: {"embed":
            (first stage), "layers": leaves stacked over the layers, "head": (last stage)}.
    """

    config: Config
    model: PipelineModel
    step: int
    stages: tuple[tuple[range, Params], ...]


def load_saved_model(run_dir: Path, step: int | None = None) -> SavedModel:
    """Load a run's model from the checkpoint after `step` steps, or from the last one.

    Raises:
        UserError: There is no such run or checkpoint, or it is damaged.
    """
    folder = saved_run(run_dir).folder
    manifest = folder.manifest(_chosen(folder, step))
    damage = damage_of(folder.finished(manifest.step), thorough=True)
    if damage is not None:
        raise UserError(f"{damage} (--step takes another checkpoint)")
    require_known_model(manifest, run_dir)
    files = TreeFiles()
    checkpoint = folder.finished(manifest.step)
    return SavedModel(
        config=manifest.config,
        model=build_model(without_changeable_options(manifest.config), manifest.vocab_size),
        step=manifest.step,
        stages=tuple(
            (layers, files.read(stage_path(checkpoint, number), [PARAMS])[PARAMS])
            for number, layers in enumerate(manifest.layers)
        ),
    )


def _chosen(folder: CheckpointFolder, step: int | None) -> int:
    steps = folder.steps()
    if not steps:
        raise UserError(f"{folder.path}: got no checkpoint, expected a run that has saved one")
    if step is None:
        return steps[-1]
    if step not in steps:
        there = ", ".join(map(str, steps))
        raise UserError(f"--step: got {step}, expected a checkpoint in {folder.path}: {there}")
    return step


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn.

    Attributes:
        temperature: Divides the logits; 0: always take the likeliest token.
        top_k: Draw from this many of the likeliest tokens; None: from all.

    Raises:
        UserError: A number is out of range; the error names the command's option.
    """

    num_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise _not("--tokens", self.num_tokens, "a whole number of at least 1")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise _not("--temperature", self.temperature, "a number of at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise _not("--top-k", self.top_k, "a whole number of at least 1")
        if not 0 <= self.seed < _SEEDS:
            raise _not("--seed", self.seed, f"a whole number from 0 to below {_SEEDS}")


def continuation(
    model: GivesLogits,
    params: Params,
    prompt: Sequence[int],
    settings: SamplingSettings,
    *,
    sequence_length: int,
    num_known: int,
) -> Iterator[int]:
    """Draw the tokens that follow a prompt, one by one.

    Each token is predicted from the last `sequence_length` tokens before it. All of them are
    computed again, without a cache: one program is compiled, for any causal model.

    Args:
        params: The whole model's (`join_stages`).
        prompt: At least one id.
        num_known: Ids from this one on are never drawn, as the tokenizer has no text for them.
    """
    params = jax.device_put(params)
    draw = jax.jit(drawing(model, settings, num_known))
    ids = list(prompt)
    for number in range(settings.num_tokens):
        last = ids[-sequence_length:]
        window = np.zeros((1, sequence_length), np.int32)
        window[0, : len(last)] = last
        ids.append(int(draw(params, window, len(last), number)))
        yield ids[-1]


def drawing(
    model: GivesLogits, settings: SamplingSettings, num_known: int
) -> Callable[[Params, ArrayLike, ArrayLike, ArrayLike], jax.Array]:
    """A function, ready for `jax.jit`, that draws the next token.

    Returns:
        (parameters, int32 tokens [1, sequence_length], the number of valid ones, the number of
        tokens drawn before) -> id.
    """
    key = jax.random.key(settings.seed)

    def draw(params: Params, window: ArrayLike, length: ArrayLike, number: ArrayLike) -> jax.Array:
        logits = model_logits(model, params, jnp.asarray(window))[0, jnp.asarray(length) - 1]
        logits = jnp.where(jnp.arange(logits.size) < num_known, logits, -jnp.inf)
        if settings.temperature == 0:
            return jnp.argmax(logits)
        if settings.top_k is not None:
            least = lax.top_k(logits, min(settings.top_k, logits.size))[0][-1]
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        scaled = logits / settings.temperature
        return jax.random.categorical(jax.random.fold_in(key, jnp.asarray(number)), scaled)

    return draw


def _not(option: str, got: float, expected: str) -> UserError:
    return UserError(f"{option}: got {got}, expected {expected}")
