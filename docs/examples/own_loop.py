"""A training loop of one's own, over one's own model and batches.

Run it with `python own_loop.py`, or through two stages with
`jaxmorph launch --stages 2 own_loop.py`.
"""

from pathlib import Path

import numpy as np
import optax
from causal_mixer import build  # the model of docs/tutorial/own-model.md

import jaxmorph

TEXT = np.frombuffer(Path(optax.__file__).read_bytes(), np.uint8)
SIZES = {"batch": {"microbatches": 4, "microbatch_size": 4}, "data": {"sequence_length": 64}}


def batches(steps):
    """Bytes of a text and those that follow, the same on every rank: [16, 64] each."""
    random = np.random.default_rng(0)
    for _ in range(steps):
        starts = random.integers(len(TEXT) - 65, size=16)
        windows = np.stack([TEXT[start : start + 65] for start in starts])
        yield windows[:, :-1], windows[:, 1:]


model = build(preset="tiny", sequence_length=64, vocab_size=256)
with jaxmorph.Trainer(model, SIZES, optimizer=optax.adam(3e-3)) as trainer:
    for batch in batches(steps=50):
        metrics = trainer.step(batch)
        if trainer.rank == 0 and metrics.step % 10 == 9:
            print(f"step {metrics.step}: loss {metrics.loss:.3f} in {metrics.step_s:.3f} s")
