"""The parts on copies between the device and slots: each way of copying, in either direction."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxmorph.copies.copy_engine import CopyEngineTier
from jaxmorph.copies.kernel_copies import KernelTier
from jaxmorph.copies.ways import ways_to_copy
from jaxmorph.gpu_check.child_process import Told, ask
from jaxmorph.gpu_check.copy_settings import BARELY_BYTES, CopySettings
from jaxmorph.gpu_check.report import Row
from jaxmorph.gpu_check.settings import CheckSettings
from jaxmorph.gpu_check.tier_check import INCOMING, OUTGOING
from jaxmorph.gpu_check.tier_found import TierFound, found_from, rows_of

_CHILD = "jaxmorph.gpu_check.copy_child"
_LEAST_S = 20.0  # with less left there is no use in starting a process

AskAbout = Callable[[Sequence[str], float], Told]
"""Has a process look at tiers, given their names, for no longer than so many seconds."""


@dataclass(frozen=True)
class CopiesReport:
    """What was found out about the ways of copying in one direction.

    Attributes:
        platform: Where arrays are kept; nothing is asked of how fast copies on a CPU are.
        tiers: In the order in which runs try them.
        taken: The one that runs take: the first that is right; None if none is.
        recommended: The fastest with large messages among those that are right and hardly disturb
            computation; None if there is none.
    """

    into: bool
    platform: str
    tiers: list[TierFound]
    taken: str | None
    recommended: str | None

    def rows(self) -> Iterator[Row]:
        """Each tier's rows, and two that say which is best."""
        for found in self.tiers:
            asked = self.platform != "cpu" and found.name == self.taken
            yield from rows_of(found, is_asked=asked)
        slots = "into slots" if self.into else "out of slots"
        yield Row(f"runs copy {slots} by", self.taken or "nothing", "", self.taken is not None)
        if self.platform == "cpu":
            told = "its times mean nothing"
        elif self.recommended is None:
            told = "none hardly disturbs computation"
        elif self.recommended == self.taken:
            told = "the one that runs take"
        else:
            told = f"it should come before {self.taken}"
        yield Row("recommended", self.recommended or "none", told)


def measure_outgoing(settings: CheckSettings) -> CopiesReport:
    """What the ways of copying into slots do."""
    return _measure(OUTGOING, settings)


def measure_incoming(settings: CheckSettings) -> CopiesReport:
    """What the ways of copying out of slots do."""
    return _measure(INCOMING, settings)


def _measure(direction: str, settings: CheckSettings) -> CopiesReport:
    device = jax.devices()[0]
    ways = ways_to_copy(SingleDeviceSharding(device), lambda keeper: None)
    tiers = ways.outgoing if direction == OUTGOING else ways.incoming
    names = [tier.name for tier in tiers]
    ways.close()
    asked = partial(_ask_child, direction, device)
    own = settings.copies
    limited = replace(own, part_s=min(own.part_s, settings.left_s))
    return report_on(direction, device.platform, look_at_tiers(names, asked, limited))


def _ask_child(direction: str, device: Any, names: Sequence[str], limit_s: float) -> Told:
    return ask_on(device, _CHILD, [direction, *names], limit_s)


def ask_on(device: Any, module: str, words: Sequence[str], limit_s: float) -> Told:
    """Have a process find something out on the same kind of device.

    Args:
        limit_s: For how long it may run.
    """
    options = ["--allow-cpu"] if device.platform == "cpu" else []
    options.append(f"--limit-s={limit_s:.1f}")
    return ask([sys.executable, "-m", module, *words, *options], limit_s)


def look_at_tiers(
    names: Sequence[str],
    ask_about: AskAbout,
    settings: CopySettings,
    clock: Callable[[], float] = time.monotonic,
) -> list[TierFound]:
    """What processes tell of tiers; one that hangs or dies keeps none from being looked at.

    Args:
        names: The tiers', in the order in which runs try them.
        ask_about: Has a process look at some.
        settings: For how long, and whether each gets a process of its own.
        clock: Seconds.
    """
    found: dict[str, TierFound] = {}
    end_s = clock() + settings.part_s
    while waiting := [name for name in names if name not in found]:
        left_s = end_s - clock()
        if left_s < _LEAST_S:
            late = f"not looked at: the others took all of {settings.part_s:.0f} s"
            found |= {name: TierFound(name, trouble=late) for name in waiting}
            break
        group = _next_group(waiting, settings)
        told = ask_about(group, min(settings.child_s * len(group), left_s))
        found |= _understood(group, told)
    return [found[name] for name in names]


def _next_group(waiting: Sequence[str], settings: CopySettings) -> Sequence[str]:
    """Those that a process looks at together: a kernel that goes wrong is to take none with it."""
    if not settings.is_isolated:
        return waiting
    alone = {KernelTier.name, CopyEngineTier.name}  # the latter is what runs take
    behind = next((at for at, name in enumerate(waiting) if name in alone), len(waiting))
    return waiting[: max(1, behind)]


def _understood(group: Sequence[str], told: Told) -> Mapping[str, TierFound]:
    """What was told of each tier; the last that anything was told of is who ended the process."""
    fields: dict[str, list[tuple[str, Any]]] = {}
    for line in told.lines:
        name = line.pop("tier", None)
        if name in group:
            fields.setdefault(name, []).extend(line.items())
    last = [*fields][-1] if fields else group[0]
    if told.trouble or not fields:
        trouble = told.trouble or "its process told nothing"
        fields.setdefault(last, []).append(("trouble", trouble))
    return {name: found_from(name, told_of_it) for name, told_of_it in fields.items()}


def report_on(direction: str, platform: str, tiers: Sequence[TierFound]) -> CopiesReport:
    """Which tier runs take, and which they should.

    Args:
        platform: Where arrays are kept.
        tiers: In the order in which runs try them.
    """
    right = [found for found in tiers if found.is_right]
    gentle = [found for found in right if found.is_gentle]
    best = max(gentle, key=_large_gb_per_s, default=None)
    return CopiesReport(
        into=direction == OUTGOING,
        platform=platform,
        tiers=list(tiers),
        taken=right[0].name if right else None,
        recommended=best.name if best else None,
    )


def _large_gb_per_s(found: TierFound) -> float:
    """How fast messages are from which on calls hardly count; the largest where none is."""
    speeds = [speed for speed in found.speeds if speed.num_bytes >= BARELY_BYTES]
    speeds = speeds or found.speeds[-1:]
    return min((speed.gb_per_s for speed in speeds), default=0.0)
