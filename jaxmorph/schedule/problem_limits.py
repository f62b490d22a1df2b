"""A problem's memory caps: in microbatches or in bytes."""

from collections.abc import Mapping
from typing import Any, cast

from jaxmorph.errors import UserError
from jaxmorph.schedule.costs import Limits
from jaxmorph.schedule.fields import counts, one_of
from jaxmorph.schedule.memory import StashBytes
from jaxmorph.schedule.ops import LiveUntil

_CAP, _AFTER_FORWARD, _AFTER_BACKWARD = BYTE_FIELDS = (
    "max_stash_bytes",
    "stash_bytes_after_forward",
    "stash_bytes_after_backward",
)
"""The optional fields of a problem that tell of bytes."""


def parse_limits(fields: Mapping[str, Any], num_stages: int) -> Limits:
    """Reads a problem's fields about memory.

    Args:
        fields: The problem's fields, each one number per stage, or one for all.

    Returns:
        The caps; sizes of the stash are there even without a cap on bytes, when both were given.

    Raises:
        UserError: Names the field, what was got and what was expected.
    """
    live_until = cast(LiveUntil, one_of("live_until", fields.get("live_until") or "B", ("B", "W")))
    max_live = counts("max_live", fields.get("max_live"), num_stages)
    cap = counts(_CAP, fields.get(_CAP), num_stages)
    after_forward = counts(_AFTER_FORWARD, fields.get(_AFTER_FORWARD), num_stages, least=0)
    after_backward = counts(_AFTER_BACKWARD, fields.get(_AFTER_BACKWARD), num_stages, least=0)
    if after_forward is None or after_backward is None:
        _require_no_bytes(fields)
        return Limits(max_live, live_until)
    if cap is not None and max_live is not None:
        raise UserError(f"{_CAP}: got max_live as well, expected only one of them")
    sizes = StashBytes(after_forward, after_backward)
    return Limits(max_live, live_until, max_stash_bytes=cap, stash_bytes=sizes)


def _require_no_bytes(fields: Mapping[str, Any]) -> None:
    """A cap needs both sizes, and each size the other."""
    given = [field for field in BYTE_FIELDS if fields.get(field) is not None]
    missing = [field for field in BYTE_FIELDS[1:] if field not in given]
    if given:
        raise UserError(f"{missing[0]}: missing, expected bytes, since {given[0]} is given")
