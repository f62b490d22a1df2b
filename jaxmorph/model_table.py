"""Prints how large a model's presets are, whole and by stage; nothing is computed but shapes."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from jaxmorph.errors import UserError
from jaxmorph.model_factory import load_factory
from jaxmorph.stage.model import PipelineModel, cut_layers
from jaxmorph.stage.parameter_count import parameter_count, stage_parameter_counts


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
        console: Where to print.
        factory: The model's module, with `build` and `PRESETS`.
        presets: Which presets; None: all.
        vocab_size: Tokens in the vocabulary.
        sequence_length: Tokens in a sequence.
        num_stages: How many stages to cut each into; 1: only the whole is shown.

    Raises:
        UserError: If there is no such factory or preset, or a preset can't be cut so.
    """
    module = load_factory(factory)
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{factory}, vocabulary {vocab_size:,}, {sequence_length:,} positions",
        title_justify="left",
    )
    for name in ("preset", "layers", "parameters", *(["by stage"] if num_stages > 1 else [])):
        table.add_column(name, justify="left" if name in ("preset", "by stage") else "right")
    for preset in presets or module.PRESETS:
        try:
            model = module.build(
                preset=preset, sequence_length=sequence_length, vocab_size=vocab_size
            )
        except ValueError as error:
            raise UserError(f"--{error}") from error
        table.add_row(preset, *_row(model, num_stages))
    console.print(table)


def _row(model: PipelineModel, num_stages: int) -> list[str]:
    row = [str(model.num_layers), f"{parameter_count(model):,}"]
    if num_stages > 1:
        layers = cut_layers(model.num_layers, num_stages)
        row.append(" ".join(f"{count:,}" for count in stage_parameter_counts(model, layers)))
    return row
