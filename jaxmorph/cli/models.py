"""The commands `export`, `sample` and `model`: a run's model, and the sizes of presets."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich import box
from rich.console import Console
from rich.table import Table

from jaxmorph.config import Config
from jaxmorph.config.sections import Data, short_factory_name
from jaxmorph.data import Tokenizer, is_token_array, open_tokenizer
from jaxmorph.errors import UserError, in_users_code
from jaxmorph.report.text import short_count
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.stage.model import (
    GivesLogits,
    Params,
    PipelineModel,
    join_stages,
    model_logits,
    with_logits,
)
from jaxmorph.stage.parameters import parameter_count, stage_parameter_counts, write_model
from jaxmorph.training.model_factory import load_factory
from jaxmorph.training.saved_model import SamplingSettings, continuation, load_saved_model


def export_model(run_dir: Path, step: int | None, to: Path | None) -> str:
    """Write a checkpoint's parameters by the model's `write_weights`, and the run's tokenizer.

    Returns a line about it.

    Args:
        step: The checkpoint after so many steps; None: the last one.
        to: The output folder; None: `exported/step_N` in the run's directory.

    Raises:
        UserError: There is no such checkpoint, or its model can't write weights.
    """
    saved = load_saved_model(run_dir, step)
    folder = run_dir / "exported" / f"step_{saved.step}" if to is None else to
    write_model(saved.model, str(folder), saved.stages)
    left_out = _copy_tokenizer(saved.config, folder)
    num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    model = f"{saved.config.model.factory} {saved.config.model.preset}"
    return f"{model} after {saved.step} steps: {num_bytes:,} bytes in {folder}{left_out}"


def _copy_tokenizer(config: Config, folder: Path) -> str:
    """Copy the run's tokenizer.json beside the parameters; returns why not, if that fails."""
    named = config.data.tokenizer
    if named == "bytes":
        return ""
    try:
        shutil.copyfile(named, folder / "tokenizer.json")
    except shutil.SameFileError:
        return ""
    except OSError as error:
        return f", without the tokenizer {named}: {error.strerror}"
    return ""


def sample(
    run_dir: Path,
    prompt: str,
    settings: SamplingSettings,
    *,
    step: int | None = None,
    tokenizer: str | None = None,
) -> str:
    """A prompt and its continuation by a run's model, on one device.

    The text is shorter than asked for if the model ends the document.

    Args:
        prompt: The text to continue; an empty one begins a document.
        step: The checkpoint after so many steps; None: the last one.
        tokenizer: Replaces the run's `data.tokenizer`.

    Raises:
        UserError: There is no such run, its model has no logits, or the prompt can't be encoded.
    """
    saved = load_saved_model(run_dir, step)
    model = with_logits(saved.model)
    words = _tokenizer(saved.config, tokenizer)
    ids = _encoded(prompt, words, saved.config.data)
    params = join_stages(saved.stages)
    sequence_length = saved.config.data.sequence_length
    _check_ids(ids, _vocab_size(model, params, sequence_length))
    drawn: list[int] = []
    for token in continuation(
        model,
        params,
        ids,
        settings,
        sequence_length=sequence_length,
        num_known=words.vocab_size,
    ):
        if token == words.separator:
            break
        drawn.append(token)
    return prompt + _decoded_after(ids, drawn, words)


def _tokenizer(config: Config, named: str | None) -> Tokenizer:
    if named is not None:
        return open_tokenizer(named)
    if is_token_array(config.data.path) and config.data.tokenizer == "bytes":
        raise UserError(
            f"--tokenizer: got none, expected the tokenizer of the run's token array, "
            f"{config.data.path}: the path of a tokenizer.json, or bytes"
        )
    return open_tokenizer(config.data.tokenizer)


def _encoded(prompt: str, tokenizer: Tokenizer, data: Data) -> list[int]:
    try:
        ids = tokenizer.encode([prompt.encode()]).tolist()
    except UnicodeEncodeError as error:
        raise UserError(f"--prompt: got {prompt!r}, expected text in UTF-8") from error
    if ids:
        return ids
    if tokenizer.separator is None:
        raise UserError(
            f"--prompt: got {prompt!r}, expected some text: the tokenizer has no token for the "
            "beginning of a document"
        )
    if data.is_packed:
        raise UserError(
            f"--prompt: got {prompt!r}, expected some text: with data.packing: segments a model "
            "learns no beginning of a document"
        )
    return [tokenizer.separator]


def _vocab_size(model: GivesLogits, params: Params, sequence_length: int) -> int:
    tokens = jax.ShapeDtypeStruct((1, sequence_length), jnp.int32)
    return jax.eval_shape(lambda p, t: model_logits(model, p, t), params, tokens).shape[-1]


def _check_ids(ids: list[int], vocab_size: int) -> None:
    if max(ids) >= vocab_size:
        raise UserError(
            f"--prompt: got token {max(ids):,}, expected ids below {vocab_size:,}, the model's "
            "vocabulary (is it the tokenizer of the run's data?)"
        )


def _decoded_after(prompt: list[int], drawn: list[int], tokenizer: Tokenizer) -> str:
    """The text of the drawn tokens, with the white space between prompt and continuation."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *drawn])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(drawn)


def print_model_table(
    console: Console,
    factory: str,
    presets: Sequence[str] | None,
    vocab_size: int,
    sequence_length: int,
    num_stages: int,
) -> None:
    """Print a row for each preset, with the parameters of each stage if there are several.

    Args:
        factory: The model's module, with `build` and `PRESETS`.

    Raises:
        UserError: There is no such factory or preset, or it can't be built or cut.
    """
    factory = short_factory_name(factory)
    module = load_factory(factory, where="--factory")
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{factory}, vocabulary {vocab_size:,}, {sequence_length:,} positions",
        title_justify="left",
    )
    for name in ("preset", "layers", "parameters", *(["by stage"] if num_stages > 1 else [])):
        table.add_column(name, justify="left" if name in ("preset", "by stage") else "right")
    sizes = {"sequence_length": sequence_length, "vocab_size": vocab_size}
    for preset in presets or _presets(module, factory):
        table.add_row(preset, *_row(_build(module, factory, preset, sizes), preset, num_stages))
    console.print(table)


def _presets(module: Any, factory: str) -> Iterable[str]:
    if not hasattr(module, "PRESETS"):
        raise UserError(
            f"--factory: got {factory!r} without PRESETS to list, expected a module that has them, "
            "or --preset as well"
        )
    return module.PRESETS


def _build(module: Any, factory: str, preset: str, sizes: Mapping[str, int]) -> PipelineModel:
    with in_users_code("build", module.build, otherwise="--factory"):
        try:
            return module.build(preset=preset, **sizes)
        except (TypeError, ValueError) as error:
            name, colon, rest = str(error).partition(":")
            if colon and name in ("preset", *sizes):
                raise UserError(f"--{name.replace('_', '-')}:{rest}") from error
            raise UserError(f"--factory: {factory} cannot build {preset!r}: {error}") from error


def _row(model: PipelineModel, preset: str, num_stages: int) -> list[str]:
    row = [str(model.num_layers), f"{parameter_count(model):,}"]
    if num_stages > model.num_layers:
        raise UserError(
            f"--stages: got {num_stages}, expected at most the {model.num_layers} layers of "
            f"{preset!r}"
        )
    if num_stages > 1:
        counts = stage_parameter_counts(model, cut_layers(model.num_layers, num_stages))
        row.append(", ".join(map(short_count, counts)))
    return row
