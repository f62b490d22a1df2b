"""Prints how large a model's presets are, whole and by stage; nothing is computed but shapes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jaxmorph.errors import UserError
from jaxmorph.reporting.text import short_count
from jaxmorph.stage.model import PipelineModel, cut_layers
from jaxmorph.stage.parameters import parameter_count, stage_parameter_counts
from jaxmorph.training.model_factory import load_factory


def print_model_table(
    console: Console,
    factory: str,
    presets: Sequence[str] | None,
    vocab_size: int,
    sequence_length: int,
    num_stages: int,
) -> None:
    """Print one row per preset.

    Args:
        factory: The model's module, with `build` and `PRESETS`.
        num_stages: How many stages to cut each into; 1: only the whole is shown.

    Raises:
        UserError: If there is no such factory or preset, or a preset can't be built or cut so.
    """
    module = load_factory(factory, "--factory")
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
