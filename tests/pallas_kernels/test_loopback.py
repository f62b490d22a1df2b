"""The protocol between two processes, on the data plane's slots, by the copies of `protocol`."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from delegate_process import take, wait_until_free
from slot_words import words_of

from jaxmorph.pallas_kernels import copy_to_slot
from jaxmorph.transport.names import add
from jaxmorph.transport.slots import Slots

HERE = Path(__file__).parent
NUM_SLOTS, SLOT_BYTES, MESSAGES = 2, 3 * 4096 + 7, 100
FIRST = (1 << 32) - MESSAGES // 2  # so that numbers wrap half-way


@pytest.mark.one_jax
def test_two_processes_exchange_messages_across_the_wrap_and_never_overwrite_one():
    go, come = (Slots.create(NUM_SLOTS, SLOT_BYTES, FIRST) for _ in range(2))
    arguments = map(str, (go.fd, come.fd, NUM_SLOTS, SLOT_BYTES, MESSAGES, FIRST))
    path = f"{HERE}:{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    delegate = subprocess.Popen(
        [sys.executable, str(HERE / "delegate_process.py"), *arguments],
        pass_fds=(go.fd, come.fd),
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
    )
    random, sent = np.random.default_rng(0), []
    payload = np.empty(SLOT_BYTES, np.uint8)
    try:
        for count in range(MESSAGES + NUM_SLOTS):
            if count < MESSAGES:  # as far ahead of what comes back as slots allow
                if count >= NUM_SLOTS:
                    wait_until_free(go, add(FIRST, count - NUM_SLOTS))
                sent.append(random.integers(0, 256, SLOT_BYTES, np.uint8))
                copy_to_slot(sent[-1], words_of(go, add(FIRST, count)))
            if count >= NUM_SLOTS:
                take(come, add(FIRST, count - NUM_SLOTS), payload)
                assert np.array_equal(payload ^ 0xFF, sent[count - NUM_SLOTS])
        assert delegate.wait(20) == 0
    finally:
        delegate.kill()
        _, errors = delegate.communicate()
        go.close()
        come.close()
    assert errors == b""
