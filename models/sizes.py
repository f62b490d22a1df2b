"""Checks that the models' configurations share, and presets with overrides; imports no JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

COMPUTE_DTYPES = ("float32", "bfloat16")
ATTENTIONS = ("auto", "xla", "cudnn")


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes that decide which implementations can compute attention.

    Attributes:
      num_heads: heads of queries.
      dtype: of queries, keys and values.
      packed: whether sequences hold several documents, so that a mask is needed.
    """

    microbatch_size: int
    sequence_length: int
    num_heads: int
    num_key_value_heads: int
    head_width: int
    dtype: str
    packed: bool = False


def check_counts(sizes: object, names: Sequence[str]) -> None:
    """Raises ValueError unless all these attributes are whole numbers of at least 1."""
    for name in names:
        size = getattr(sizes, name)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}: got {size!r}, expected a whole number of at least 1")


def check_multiple(sizes: object, name: str, divisor_name: str) -> None:
    """Raises ValueError unless the first attribute is a multiple of the second."""
    size, divisor = getattr(sizes, name), getattr(sizes, divisor_name)
    if size % divisor:
        raise ValueError(f"{name}: got {size}, expected a multiple of {divisor_name}={divisor}")


def check_divisible(sizes: object, names: Sequence[str], num_shards: int) -> None:
    """Raises ValueError unless each of these attributes is a multiple of the number of shards."""
    for name in names:
        size = getattr(sizes, name)
        if size % num_shards:
            raise ValueError(
                f"{name}: got {size}, expected a multiple of {num_shards}, the devices of a stage"
            )


def check_options(config: Any) -> None:
    """Raises ValueError unless the options that all models share are valid."""
    for name in ("tied", "sequence_parallel"):
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name}: got {getattr(config, name)!r}, expected true or false")
    if config.compute_dtype not in COMPUTE_DTYPES:
        expected = " or ".join(COMPUTE_DTYPES)
        raise ValueError(f"compute_dtype: got {config.compute_dtype!r}, expected {expected}")
    if config.attention not in ATTENTIONS:
        *others, last = ATTENTIONS
        expected = f"{', '.join(others)} or {last}"
        raise ValueError(f"attention: got {config.attention!r}, expected {expected}")
    if config.attention == "cudnn" and config.compute_dtype == "float32":
        raise ValueError(
            "attention: got 'cudnn', expected auto or xla with compute_dtype=float32: cuDNN's "
            "takes bfloat16 (of a run: precision.compute)"
        )
    is_number = isinstance(config.dropout, int | float) and not isinstance(config.dropout, bool)
    if not is_number or not 0 <= config.dropout < 1:
        raise ValueError(f"dropout: got {config.dropout!r}, expected a number from 0 to below 1")


_NOT_OF_MODEL = {"vocab_size", "sequence_length", "compute_dtype"}


def preset_sizes(
    presets: Mapping[str, Mapping[str, Any]],
    preset: str,
    config: type[Any],
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns a preset's sizes with overrides.

    Args:
      config: the dataclass of sizes. A run may set its fields in place of the preset's values,
        except those that follow from data and precision.

    Raises:
      ValueError: an unknown preset or override.
    """
    if preset not in presets:
        raise ValueError(f"preset: got {preset!r}, expected one of {', '.join(presets)}")
    overridable = [each.name for each in fields(config) if each.name not in _NOT_OF_MODEL]
    for name in overrides:
        if name not in overridable:
            raise ValueError(f"got {name!r}, expected one of preset, {', '.join(overridable)}")
    return {**presets[preset], **overrides}
