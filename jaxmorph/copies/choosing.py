"""Which way of copying a rank takes: the first that works, or the one that the user names."""

import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Protocol, TypeVar

from jax.sharding import Sharding

from jaxmorph.copies.host_callbacks import host_callback_tiers
from jaxmorph.copies.programs import CopyTier
from jaxmorph.copies.trial import try_tier
from jaxmorph.errors import UserError

AUTO = "auto"
_NOT_FOR_THIS = "it is not for the device that JAX computes on"
_log = logging.getLogger(__name__)


class _Named(Protocol):
    name: str


Tier = TypeVar("Tier", bound=_Named)


def choose_tier(placement: Sharding, tiers: Sequence[CopyTier] | None = None) -> CopyTier:
    """The first tier that copies a payload into slots as it should.

    Args:
        placement: Where the stage keeps its arrays.
        tiers: What to try, in this order; None: those with host callbacks.

    Raises:
        RuntimeError: If none works; the message says why.
    """
    tried = host_callback_tiers() if tiers is None else tiers
    return first_that_works(tried, lambda tier: try_tier(tier, placement), "into")


def first_that_works(
    tiers: Sequence[Tier], attempt: Callable[[Tier], None], direction: str
) -> Tier:
    """The first tier that passes its trial; of those before it, a warning says why they didn't.

    Args:
        tiers: What to try, in this order.
        attempt: Tries one; raises whatever goes wrong.
        direction: "into" or "out of" slots, for messages.

    Raises:
        RuntimeError: If none works; the message says why.
    """
    failures: list[tuple[str, str]] = []
    for tier in tiers:
        reason = why_not(tier, attempt)
        if reason is None:
            _warn_of(failures, direction)
            return tier
        failures.append((tier.name, reason))
    told = "; ".join(f"{name}: {reason}" for name, reason in failures)
    raise RuntimeError(f"no way to copy {direction} a slot works here: {told}")


def _warn_of(failures: Sequence[tuple[str, str]], direction: str) -> None:
    """Warn once of each reason."""
    for reason, same in groupby(failures, key=itemgetter(1)):
        names = [name for name, _ in same]
        listed = " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
        _log.warning("copies %s slots by %s don't work here: %s", direction, listed, reason)


def named_one(tiers: Sequence[Tier], attempt: Callable[[Tier], None], wanted: str) -> Tier:
    """The tier that the user has chosen.

    Args:
        attempt: Tries one; raises whatever goes wrong.

    Raises:
        UserError: If it doesn't work here; it names those that do.
    """
    found = next((tier for tier in tiers if tier.name == wanted), None)
    reason = _NOT_FOR_THIS if found is None else why_not(found, attempt)
    if found is not None and reason is None:
        return found
    others = (tier for tier in tiers if tier is not found)
    working = [tier.name for tier in others if why_not(tier, attempt) is None]
    raise UserError(
        f"transport.copies: got {wanted}, which doesn't work here ({reason}), expected "
        f"{', '.join([AUTO, *working])}"
    )


def why_not(tier: Tier, attempt: Callable[[Tier], None]) -> str | None:
    """Why a tier doesn't work here; None if it does.

    Args:
        attempt: Tries it; raises whatever goes wrong.
    """
    try:
        attempt(tier)
    except Exception as error:  # whatever it is: another one may do
        return " ".join(repr(error).split())
    return None
