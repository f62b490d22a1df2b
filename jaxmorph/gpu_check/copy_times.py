"""How long copies take: of messages of some sizes, beside bare ones, and of four bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.payload import PayloadShape
from jaxmorph.gpu_check.bare_copies import BareCopy
from jaxmorph.gpu_check.copy_settings import CopySettings
from jaxmorph.gpu_check.messages import Message, Messages
from jaxmorph.gpu_check.random_payloads import random_contents
from jaxmorph.gpu_check.whole_payloads import OpenMessages

_WARM_UPS = 3
_WORD = jnp.dtype(jnp.uint32)


@dataclass(frozen=True)
class Speed:
    """How fast messages of a size are; medians.

    Attributes:
        num_bytes: The size.
        time_ms: From the call until the signal is seen, or the device has the payload.
        gb_per_s: By that.
        bare_gb_per_s: Of the bare copies that took turns with them; None where there are none.
    """

    num_bytes: int
    time_ms: float
    gb_per_s: float
    bare_gb_per_s: float | None

    @property
    def share(self) -> float | None:
        """Of the bare copies' rate."""
        return self.gb_per_s / self.bare_gb_per_s if self.bare_gb_per_s else None


@dataclass(frozen=True)
class Latency:
    """How long a message of four bytes takes while the device has nothing else to do; medians.

    Attributes:
        call_us: Until the call that copies returns.
        over_us: Until the signal is seen, or the device has the payload.
    """

    call_us: float
    over_us: float


def measure_speed(
    open_messages: OpenMessages, placement: Sharding, bare: BareCopy | None, settings: CopySettings
) -> list[Speed]:
    """Time messages of each size and bare copies in turns.

    Args:
        open_messages: Of the tier.
        placement: Where payloads are kept.
        bare: Copies with nothing else.
        settings: The sizes, and how often.
    """
    speeds = []
    for num_bytes in settings.speed_bytes:
        with open_messages(slot_bytes=num_bytes, num_slots=2) as messages:
            message = _message(messages, placement, num_bytes)
            value, own_s, bare_s = message.on_device(), [], []
            for _ in range(settings.repeats + _WARM_UPS):
                if bare is not None:
                    bare_s.append(bare(messages.spare(), value))
                own_s.append(messages.time_s(message)[1])
        speeds.append(speed_of(num_bytes, own_s[_WARM_UPS:], bare_s[_WARM_UPS:]))
    return speeds


def speed_of(num_bytes: int, own_s: Sequence[float], bare_s: Sequence[float]) -> Speed:
    """Speed by the medians of times.

    Args:
        num_bytes: Of each message and bare copy.
        own_s: Of messages.
        bare_s: Of bare copies; there may be none.
    """
    rate = num_bytes / median(own_s) / 1e9
    bare = num_bytes / median(bare_s) / 1e9 if bare_s else None
    return Speed(num_bytes, 1e3 * median(own_s), rate, bare)


def measure_latency(
    open_messages: OpenMessages, placement: Sharding, settings: CopySettings
) -> Latency:
    """Time messages of four bytes, one after another.

    Args:
        open_messages: Of the tier.
        placement: Where payloads are kept.
        settings: How many.
    """
    with open_messages(slot_bytes=_WORD.itemsize, num_slots=2) as messages:
        message = _message(messages, placement, _WORD.itemsize)
        times = [messages.time_s(message) for _ in range(settings.num_calls + _WARM_UPS)]
    calls_s, overs_s = zip(*times[_WARM_UPS:], strict=True)
    return Latency(1e6 * median(calls_s), 1e6 * median(overs_s))


def _message(messages: Messages, placement: Sharding, num_bytes: int) -> Message:
    """A message whose payload has been computed."""
    contents = random_contents(np.random.default_rng(0), _WORD, num_bytes)
    program = messages.compile(PayloadShape(contents.shape, _WORD))
    value = jax.block_until_ready(jax.device_put(contents, placement))
    return Message(program, contents, lambda: value)
