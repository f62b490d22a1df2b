"""A delegate's end of a loop: sends back what comes, its bytes changed; `test_loopback` runs it.

Arguments: the two channels' file descriptors, slots, bytes in a slot, messages, the first number.
"""

import sys
import time

import numpy as np
from slot_words import words_of

from jaxmorph.pallas_kernels import copy_from_slot, copy_to_slot, is_acknowledged
from jaxmorph.transport.names import add
from jaxmorph.transport.slots import Slots

LIMIT_US = 1_000_000
LIMIT_S = 20


def main() -> None:
    come_fd, go_fd, num_slots, slot_bytes, messages, first = map(int, sys.argv[1:])
    come, go = (Slots(fd, num_slots, slot_bytes) for fd in (come_fd, go_fd))
    payload = np.empty(slot_bytes, np.uint8)
    for count in range(messages):
        sequence = add(first, count)
        take(come, sequence, payload)
        if count >= num_slots:
            wait_until_free(go, add(sequence, -num_slots))
        copy_to_slot(payload ^ 0xFF, words_of(go, sequence))


def take(slots: Slots, sequence: int, into: np.ndarray) -> None:
    """Copy a message out of its slot once it is there."""
    deadline_s = time.monotonic() + LIMIT_S
    while copy_from_slot(into, words_of(slots, sequence, LIMIT_US)) != add(sequence, 1):
        assert time.monotonic() < deadline_s, f"message {sequence} never came"


def wait_until_free(slots: Slots, sequence: int) -> None:
    """Wait until a message has been acknowledged, so that its slot can take another."""
    deadline_s = time.monotonic() + LIMIT_S
    while not is_acknowledged(words_of(slots, sequence)):
        assert time.monotonic() < deadline_s, f"message {sequence} is never acknowledged"
        time.sleep(0)


if __name__ == "__main__":
    main()
