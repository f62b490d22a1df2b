import zlib
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.netns.stream_end import RECEIVER, Contents, StreamEnd, receive

MESSAGES, MESSAGE_BYTES = 3, 8192


@dataclass
class Arrived:
    tag: tuple[int, ...]
    payload: np.ndarray
    landed_s: float = 1.0

    def release(self) -> None:
        pass


class Plane:
    """Hands out messages that have been arranged."""

    def __init__(self, arrived: list[Arrived]) -> None:
        self._arrived = iter(arrived)

    def take(self, channel: object, deadline_s: float) -> Arrived:
        return next(self._arrived)


def as_sent(number: int) -> Arrived:
    payload = Contents(MESSAGE_BYTES).of(number).copy()
    return Arrived((0, number, zlib.crc32(payload.data), 0, 0, 0, 0, 0), payload)


def take_all(arrived: list[Arrived]) -> None:
    end = StreamEnd(RECEIVER, (), MESSAGES, MESSAGE_BYTES, 1.0)
    receive(cast(Any, Plane(arrived)), end)


def test_messages_are_all_different():
    assert len({as_sent(number).payload.tobytes() for number in range(100)}) == 100


def test_a_stream_as_it_was_sent_is_accepted(capsys):
    take_all([as_sent(number) for number in range(MESSAGES)])
    assert capsys.readouterr().out.count("landed_s") == MESSAGES


@pytest.mark.parametrize("numbers", [(0, 2, 1), (0, 0, 1), (0, 2, 3)])
def test_messages_out_of_order_doubled_or_lost_are_refused(numbers):
    with pytest.raises(ValueError, match="number, checksum, bytes"):
        take_all([as_sent(number) for number in numbers])


def test_a_message_with_one_bit_changed_is_refused():
    arrived = [as_sent(number) for number in range(MESSAGES)]
    arrived[1].payload[5000] ^= 1
    with pytest.raises(ValueError, match="number, checksum, bytes"):
        take_all(arrived)


def test_a_message_cut_short_is_refused():
    arrived = [as_sent(number) for number in range(MESSAGES)]
    arrived[1].payload = arrived[1].payload[:-1]
    with pytest.raises(ValueError, match="number, checksum, bytes"):
        take_all(arrived)
