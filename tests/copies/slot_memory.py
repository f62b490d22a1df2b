"""Memory of a test that stands for a slot."""

from typing import Any

import numpy as np


class _Slot:
    """Memory that notes what it is told."""

    def __init__(self, sequence, num_bytes):
        self.sequence = sequence
        self.payload = np.zeros(num_bytes, np.uint8)
        self.address = self.payload.ctypes.data
        self.signal_address = 0
        self.is_posted = False
        self.said = []

    def post(self, num_bytes, tag):
        self.is_posted = True
        self.said.append(("post", num_bytes, tag, self.payload[:num_bytes].any()))

    def complete(self):
        self.said.append("complete")

    def withdraw(self):
        self.said.append("withdraw")


Slot: Any = _Slot  # where an `OutgoingSlot` is expected
