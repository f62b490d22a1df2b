"""The process that looks at some ways of copying: `python -m jaxmorph.gpu_check.copy_child`.

`copy_parts` starts it, for what goes wrong on a GPU ends all work of a process there. It tells JSON
objects line by line, and ends when its stdin does.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from jax.sharding import SingleDeviceSharding

from jaxmorph.copies.ways import ways_to_copy
from jaxmorph.gpu_check.child_process import end_in_time, tell
from jaxmorph.gpu_check.copy_settings import CopySettings
from jaxmorph.gpu_check.device import find_device
from jaxmorph.gpu_check.lone_end import Site
from jaxmorph.gpu_check.settings import settings_for
from jaxmorph.gpu_check.tier_check import (
    INCOMING,
    OUTGOING,
    IncomingTier,
    OutgoingTier,
    check_tier,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Look at ways of copying and tell what is found.

    Args:
        arguments: Words after the command's name; those of this process when None.

    Returns:
        0, also where something is wrong with them: that has been told.
    """
    chosen = _parse(arguments)
    end_in_time(chosen.limit_s)
    device = find_device(allow_cpu=chosen.allow_cpu)
    settings, placement = settings_for(device).copies, SingleDeviceSharding(device)
    ways = ways_to_copy(placement, lambda keeper: None)
    site = Site(placement, ways.memory, settings.patience_s)
    if chosen.direction == OUTGOING:
        named = {tier.name: OutgoingTier(tier, site) for tier in ways.outgoing}
    else:
        named = {tier.name: IncomingTier(tier, site) for tier in ways.incoming}
    for name in chosen.tiers:
        if not tell_of_tier(name, named[name], settings):
            os._exit(0)  # what the tier has begun may never be over: there is no waiting for it
    ways.close()
    return 0


def tell_of_tier(
    name: str,
    looked_at: OutgoingTier | IncomingTier,
    settings: CopySettings,
    check: Callable[..., Iterable[tuple[str, Any]]] = check_tier,
    tell: Callable[..., None] = tell,
) -> bool:
    """Tell all that is found out about a tier; whether it left nothing undone."""
    told = partial(tell, tier=name)
    told()
    try:
        for which, found in check(looked_at, settings):
            told(**{which: found})
            if which == "trouble":
                return False
    except Exception as error:
        traceback.print_exc()
        told(trouble=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return False
    return True


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxmorph.gpu_check.copy_child")
    parser.add_argument("direction", choices=(OUTGOING, INCOMING))
    parser.add_argument("tiers", nargs="+")
    parser.add_argument("--allow-cpu", action="store_true", help="look at those of a CPU")
    parser.add_argument("--limit-s", type=float, required=True, help="when this process ends")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
