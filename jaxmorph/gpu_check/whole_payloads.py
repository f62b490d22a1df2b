"""Whether all bytes of a message are there when it is said so: large ones, and many small ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxmorph.byte_sizes import in_bytes
from jaxmorph.copies.payload import PayloadShape
from jaxmorph.gpu_check.copy_settings import CopySettings
from jaxmorph.gpu_check.lone_end import FIRST_OF_ALL
from jaxmorph.gpu_check.messages import Message, Messages
from jaxmorph.gpu_check.random_payloads import SlowPayloads, random_contents
from jaxmorph.transport.names import WRAP

_TYPES = (jnp.bfloat16, jnp.float32, jnp.uint8)
_RAGGED = 1  # bytes more, of the type that can
_SLOTS = 4
_SEED = 20

OpenMessages = Callable[..., AbstractContextManager[Messages]]
"""Opens messages, given `slot_bytes`, `num_slots` and the `first` one's number."""


@dataclass(frozen=True)
class Wholeness:
    """What came.

    Attributes:
        num_payloads: Of several types and sizes.
        wrong: Those of which not every byte was there, and which not.
        num_early: Payloads whose copy was asked for before they had been computed; None for copies
            that come from the host.
        num_small: Small messages with random contents and sizes.
        num_torn: Those of which not every byte was there.
    """

    num_payloads: int
    wrong: list[str] = field(default_factory=list)
    num_early: int | None = None
    num_small: int = 0
    num_torn: int = 0
    first_torn: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every byte of every message was there."""
        return not self.wrong and not self.num_torn


def look_at_payloads(
    open_messages: OpenMessages, placement: Sharding, settings: CopySettings
) -> Wholeness:
    """Copy payloads of several types and sizes one by one, then many small ones in bursts.

    Args:
        placement: Where payloads are kept.
    """
    slow, rng = SlowPayloads(placement, settings), np.random.default_rng(_SEED)
    wrong: list[str] = []
    longest = max(settings.case_bytes) + _RAGGED
    with open_messages(slot_bytes=longest, num_slots=2, first=FIRST_OF_ALL) as messages:
        cases = list(_cases(settings.case_bytes))
        for dtype, num_bytes in cases:
            contents = random_contents(rng, dtype, num_bytes)
            program = messages.compile(PayloadShape(contents.shape, dtype))
            (told,) = messages.look_at([Message(program, contents, slow.of(contents))])
            if told:
                wrong.append(f"{dtype.name}, {in_bytes(contents.nbytes)}: {told}")
        num_early = messages.num_early
    # Half of the small messages have numbers before the wrap.
    first = WRAP - settings.num_small // 2
    with open_messages(
        slot_bytes=max(settings.small_bytes), num_slots=_SLOTS, first=first
    ) as messages:
        torn = hunt(messages, placement, slow, rng, settings)
    first_torn = torn[0] if torn else ""
    return Wholeness(len(cases), wrong, num_early, settings.num_small, len(torn), first_torn)


def _cases(sizes: Sequence[int]) -> Iterator[tuple[jnp.dtype, int]]:
    for num_bytes in sizes:
        for of_type in _TYPES:
            dtype = jnp.dtype(of_type)
            yield dtype, num_bytes + (_RAGGED if dtype.itemsize == 1 else 0)


def hunt(
    messages: Messages,
    placement: Sharding,
    slow: SlowPayloads,
    rng: np.random.Generator,
    settings: CopySettings,
) -> list[str]:
    """Copy small messages of random sizes and contents through few slots, in random bursts.

    Args:
        placement: Where payloads are kept.
        rng: Draws sizes, contents and bursts.

    Returns:
        What was wrong with each that was torn.
    """
    kinds = []
    for num_bytes in settings.small_bytes:
        contents = random_contents(rng, jnp.dtype(jnp.uint32), num_bytes)
        program = messages.compile(PayloadShape(contents.shape, jnp.dtype(jnp.uint32)))
        kinds.append((program, contents, jax.device_put(contents, placement)))

    def any_message() -> Message:
        program, contents, placed = kinds[rng.integers(len(kinds))]
        word = np.uint32(rng.integers(WRAP))
        return Message(program, contents ^ word, slow.flipped(placed, word))

    torn: list[str] = []
    number = 0
    while number < settings.num_small:
        length = min(int(rng.integers(1, _SLOTS + 1)), settings.num_small - number)
        burst = [any_message() for _ in range(length)]
        for at, told in enumerate(messages.look_at(burst), start=number):
            if told:
                torn.append(f"message {at}, {in_bytes(len(burst[at - number].expected))}: {told}")
        number += length
    return torn
