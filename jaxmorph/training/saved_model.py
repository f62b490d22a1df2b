"""A run's model as a checkpoint has it, on this process alone, and how it continues a text."""

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
from jaxmorph.training.model_factory import build_model, for_any_device
from jaxmorph.training.resume import checkpoint_folder, saved_config

_SEEDS = 2**32


@dataclass(frozen=True)
class SavedModel:
    """A model with its parameters.

    Attributes:
        config: The run's, as it was when it saved.
        model: The model, as it can be computed on any device.
        stages: Each virtual stage's layers and parameters, float32 numpy arrays, in the order of
            the pipeline: {"embed": (first stage), "layers": leaves stacked over the layers, "head":
            (last stage)}.
    """

    config: Config
    model: PipelineModel
    step: int
    stages: tuple[tuple[range, Params], ...]


def load_saved_model(run_dir: Path, step: int | None = None) -> SavedModel:
    """A run's model from one of its checkpoints.

    Args:
        step: After how many steps; None: the last checkpoint.

    Raises:
        UserError: There is no such run or checkpoint, or it isn't whole; in one line.
    """
    folder = checkpoint_folder(saved_config(run_dir), run_dir)
    manifest = folder.manifest(_chosen(folder, step))
    damage = damage_of(folder.finished(manifest.step), thorough=True)
    if damage is not None:
        raise UserError(f"{damage} (--step takes another checkpoint)")
    if manifest.vocab_size == 0:
        raise UserError(
            f"{run_dir}: got the run of a script, whose model is its own, expected one of "
            "`jaxmorph train`"
        )
    files = TreeFiles()
    checkpoint = folder.finished(manifest.step)
    return SavedModel(
        config=manifest.config,
        model=build_model(for_any_device(manifest.config), manifest.vocab_size),
        step=manifest.step,
        stages=tuple(
            (layers, files.read(stage_path(checkpoint, number), [PARAMS])[PARAMS])
            for number, layers in enumerate(manifest.layers)
        ),
    )


def _chosen(folder: CheckpointFolder, step: int | None) -> int:
    steps = folder.steps()
    if not steps:
        raise UserError(f"{folder.path}: got no checkpoint, expected one, as a finished run has")
    if step is None:
        return steps[-1]
    if step not in steps:
        there = ", ".join(map(str, steps))
        raise UserError(f"--step: got {step}, expected a checkpoint's in {folder.path}: {there}")
    return step


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn.

    Attributes:
        temperature: What logits are divided by; with 0 the likeliest token is taken, always.
        top_k: How many of the likeliest tokens one is drawn from; None: all.
        seed: The same one draws the same tokens.

    Raises:
        UserError: If a number is out of its range; in one line, by the command's option.
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
    """Draws tokens that go on from a prompt, one by one.

    A token is predicted from those before it, the last `sequence_length` of them at most, all of
    which are computed again each time: one program, compiled once.

    Args:
        model: The model; it looks at no later token when it predicts one.
        params: Of all of it: see `join_stages`.
        prompt: Ids of the text so far, at least one.
        num_known: Ids from this one on are never drawn: the tokenizer doesn't know them.
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
    """How the next token is drawn, as a function that can be compiled.

    Returns:
        A function of the model's parameters, a window of int32 tokens [1, sequence_length], how
        many of them there are, and how many have been drawn before, to an id.
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
