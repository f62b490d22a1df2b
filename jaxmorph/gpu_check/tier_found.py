"""What has been found out about a way of copying, and its lines in the table."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxmorph.byte_sizes import in_bytes
from jaxmorph.gpu_check.copy_settings import BARELY_BYTES, LEAST_SHARE
from jaxmorph.gpu_check.copy_times import Latency, Speed
from jaxmorph.gpu_check.disturbance import Disturbance
from jaxmorph.gpu_check.report import Row
from jaxmorph.gpu_check.whole_payloads import Wholeness


@dataclass(frozen=True)
class TierFound:
    """What there is to know of a tier in one direction; None where that was not found out.

    Attributes:
        absent: Why it can't be had on this machine; empty if it can.
        trouble: What went wrong with it; empty if nothing did.
        wholeness: Whether messages were whole when it was said so.
        latency: Of messages of four bytes.
    """

    name: str
    absent: str = ""
    trouble: str = ""
    wholeness: Wholeness | None = None
    latency: Latency | None = None
    speeds: list[Speed] = field(default_factory=list)
    disturbance: Disturbance | None = None

    @property
    def is_right(self) -> bool:
        """Whether it is there, and nothing went wrong or was torn."""
        whole = self.wholeness is not None and self.wholeness.is_whole
        return whole and not self.absent and not self.trouble

    @property
    def is_gentle(self) -> bool:
        """Whether computation beside it is hardly slower."""
        return self.disturbance is not None and self.disturbance.is_gentle


def found_from(name: str, told: Iterable[tuple[str, Any]]) -> TierFound:
    """What `check_tier` has told of a tier.

    Args:
        told: Fields, and what they are in JSON's types.
    """
    fields = dict(told)
    types = {"wholeness": Wholeness, "latency": Latency, "disturbance": Disturbance}
    for which, of_type in types.items():
        if which in fields:
            fields[which] = of_type(**fields[which])
    fields["speeds"] = [Speed(**speed) for speed in fields.get("speeds", ())]
    return TierFound(name, **fields)


def rows_of(found: TierFound, *, is_asked: bool) -> Iterator[Row]:
    """A tier's lines of the table.

    Args:
        found: What is known of it.
        is_asked: Whether it must be fast and disturb little, as the one that runs take.
    """
    name = found.name
    if found.absent:
        yield Row(name, "absent", found.absent)
        return
    if found.trouble:
        yield Row(name, "doesn't work", found.trouble, False)
    if found.wholeness:
        yield from _wholeness_rows(name, found.wholeness)
    if found.latency:
        call, over = found.latency.call_us, found.latency.over_us
        yield Row(f"{name}: a call", f"{call:.0f} us", f"4 bytes are over after {over:.0f} us")
    for speed in found.speeds:
        yield _speed_row(name, speed, is_asked=is_asked)
    if found.disturbance:
        yield from disturbance_rows(name, found.disturbance, is_asked=is_asked)


def _wholeness_rows(name: str, found: Wholeness) -> Iterator[Row]:
    right = found.num_payloads - len(found.wrong)
    early = "" if found.num_early is None else f"{found.num_early} still being computed"
    note = found.wrong[0] if found.wrong else early
    yield Row(f"{name}: whole", f"{right} of {found.num_payloads}", note, not found.wrong)
    note = found.first_torn or "their numbers wrap"
    torn = f"{found.num_torn} of {found.num_small}"
    yield Row(f"{name}: torn", torn, note, not found.num_torn)


def _speed_row(name: str, speed: Speed, *, is_asked: bool) -> Row:
    size = in_bytes(speed.num_bytes)
    if speed.bare_gb_per_s is None or speed.share is None:
        beside = "no bare copy to compare with"
    else:
        beside = f"{speed.share:.1%} of {speed.bare_gb_per_s:.1f} GB/s, bare"
    holds = None
    if is_asked and speed.num_bytes >= BARELY_BYTES:
        holds = speed.share is not None and speed.share >= LEAST_SHARE
    value, note = f"{speed.gb_per_s:.1f} GB/s", f"{beside}; one alone {speed.time_ms:.3f} ms"
    return Row(f"{name}: {size}", value, note, holds)


def disturbance_rows(name: str, disturbance: Disturbance, *, is_asked: bool) -> Iterator[Row]:
    """What computation loses beside messages.

    Args:
        is_asked: Whether it must be little.
    """
    count, op_ms = disturbance.num_training, disturbance.op_ms
    note = f"of matmuls ({op_ms:.3f} ms an op) beside {count} messages as in training"
    holds = disturbance.is_gentle if is_asked else None
    yield Row(f"{name}: slowdown", f"{disturbance.training:.1%}", note, holds)
    rate = f"beside {disturbance.flat_out_gb_per_s:.1f} GB/s"
    yield Row(f"{name}: flat out", f"{disturbance.flat_out:.1%}", rate)
