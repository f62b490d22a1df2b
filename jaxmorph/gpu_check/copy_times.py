"""How long copies take: of messages of some sizes, beside bare ones, and of four bytes.

How fast a way of copying is shows when messages come one behind another, as over a link that has
much to carry: then what a call costs on the host goes on beside the copies. So bare copies, too,
are enqueued one behind another.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxmorph.copies.payload import PayloadShape
from jaxmorph.gpu_check.bare_copies import BareCopies
from jaxmorph.gpu_check.copy_settings import CopySettings
from jaxmorph.gpu_check.disturbance import OpenTraffic
from jaxmorph.gpu_check.lone_end import wait_until
from jaxmorph.gpu_check.messages import Message, Messages
from jaxmorph.gpu_check.random_payloads import random_contents
from jaxmorph.gpu_check.traffic import Traffic
from jaxmorph.gpu_check.whole_payloads import OpenMessages

_WARM_UPS = 3
_WORD = jnp.dtype(jnp.uint32)


@dataclass(frozen=True)
class Speed:
    """How fast messages of a size are; medians.

    Attributes:
        time_ms: Of one alone, from the call until the signal is seen, or the device has it.
        gb_per_s: Of several, one behind another.
        bare_gb_per_s: Of as many bare copies, in turns with them; None where there are none.
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
    open_messages: OpenMessages,
    open_traffic: OpenTraffic,
    placement: Sharding,
    bare: BareCopies | None,
    settings: CopySettings,
) -> list[Speed]:
    """Time messages of each size, alone and one behind another, and bare copies, in turns.

    Args:
        open_messages: Of the tier, one at a time.
        open_traffic: Of the tier, several at a time.
        placement: Where payloads are kept.
        bare: Copies with nothing else.
        settings: The sizes, how many one behind another, and how often.
    """
    speeds, count = [], settings.num_behind
    for num_bytes in settings.speed_bytes:
        payload = PayloadShape((num_bytes // _WORD.itemsize,), _WORD)
        with (
            open_messages(slot_bytes=num_bytes, num_slots=2) as messages,
            open_traffic(payload) as traffic,
        ):
            message = _message(messages, placement, num_bytes)
            value, alone_s, behind_s, bare_s = message.on_device(), [], [], []
            for _ in range(settings.repeats + _WARM_UPS):
                if bare is not None:
                    bare_s.append(bare(messages.spare(), value, count))
                behind_s.append(time_behind_s(traffic, value, count, settings.patience_s))
                alone_s.append(messages.time_s(message)[1])
        times = (each[_WARM_UPS:] for each in (alone_s, behind_s, bare_s))
        speeds.append(speed_of(num_bytes, count, *times))
    return speeds


def time_behind_s(traffic: Traffic, payload: jax.Array, count: int, patience_s: float) -> float:
    """Seconds of messages that are begun as soon as there is room, until all are over.

    Args:
        traffic: Has none under way.
        patience_s: For how long room for any one is waited for.

    Raises:
        TimeoutError: If there is none by then.
    """
    began_s = time.perf_counter()
    for number in range(count):
        wait_until(lambda: traffic.begin(payload) > 0, patience_s, f"no room for message {number}")
    traffic.drain()
    return time.perf_counter() - began_s


def speed_of(
    num_bytes: int,
    count: int,
    alone_s: Sequence[float],
    behind_s: Sequence[float],
    bare_s: Sequence[float],
) -> Speed:
    """Speed by the medians of times.

    Args:
        num_bytes: Of each message and bare copy.
        count: How many there were one behind another.
        behind_s: Of so many messages, one behind another.
        bare_s: Of as many bare copies; there may be none.
    """
    rate = count * num_bytes / median(behind_s) / 1e9
    bare = count * num_bytes / median(bare_s) / 1e9 if bare_s else None
    return Speed(num_bytes, 1e3 * median(alone_s), rate, bare)


def measure_latency(
    open_messages: OpenMessages, placement: Sharding, settings: CopySettings
) -> Latency:
    """Time messages of four bytes, one after another.

    Args:
        placement: Where payloads are kept.
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
