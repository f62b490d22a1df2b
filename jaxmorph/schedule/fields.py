"""Checks single values of a JSON object: each error names the field, what it got and expected."""

import math
from collections.abc import Sequence
from typing import Any

from jaxmorph.errors import UserError

_LONGEST_MS = 1e12


def listed(field: str, value: object, length: int, per: str) -> list[Any]:
    """A list of ``length`` values; a single number stands for that many of it.

    Args:
        length: How many values are needed.
        per: What there is one of for each value, such as ``stage``.

    Raises:
        UserError: Neither a number nor a list of that length.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value] * length
    if not isinstance(value, list):
        raise UserError(f"{field}: got {shown(value)}, expected one number or a list of {length}")
    if len(value) != length:
        raise UserError(f"{field}: got {len(value)} values, expected {length} (one per {per})")
    return value


def durations_ms(field: str, value: object, length: int, per: str) -> tuple[float, ...]:
    """One duration for each stage or link, in milliseconds; arguments as in ``listed``."""
    values = listed(field, value, length, per)
    return tuple(duration_ms(f"{field}[{index}]", item) for index, item in enumerate(values))


def duration_ms(field: str, value: object) -> float:
    """A number of milliseconds, at least 0.

    Raises:
        UserError: Anything else.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LONGEST_MS:
        return float(value)
    raise UserError(
        f"{field}: got {shown(value)}, expected a number of ms from 0 to {_LONGEST_MS:g}"
    )


def counts(field: str, value: object, length: int, least: int = 1) -> tuple[int, ...] | None:
    """One whole number for each stage; None stays None. Arguments as in ``listed``."""
    if value is None:
        return None
    values = listed(field, value, length, "stage")
    return tuple(count(f"{field}[{index}]", item, least) for index, item in enumerate(values))


def count(field: str, value: object, least: int = 1) -> int:
    """A whole number, at least ``least``.

    Raises:
        UserError: Anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise UserError(f"{field}: got {shown(value)}, expected a whole number, at least {least}")


def text(field: str, value: object) -> str:
    """Text.

    Raises:
        UserError: Anything else.
    """
    if isinstance(value, str):
        return value
    raise UserError(f"{field}: got {shown(value)}, expected text")


def one_of(field: str, value: object, choices: Sequence[str]) -> str:
    """One of a few words.

    Raises:
        UserError: Anything else.
    """
    if isinstance(value, str) and value in choices:
        return value
    *most, last = map(repr, choices)
    raise UserError(f"{field}: got {shown(value)}, expected {', '.join(most)} or {last}")


def shown(value: object) -> str:
    """A value as an error shows it: on one line, and not too long."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    line = repr(value)
    return line if len(line) <= 60 else f"{line[:57]}..."
