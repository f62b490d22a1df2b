"""A loop of one's own that adapts to slow links, is saved, and goes on where it was ended.

Run it with `jaxmorph launch --stages 3 resumed_loop.py`, as often as it takes.
"""

import signal
import sys
from pathlib import Path

import numpy as np
import optax
from causal_mixer import build  # the model of docs/tutorial/own-model.md

import jaxmorph

TEXT = np.frombuffer(Path(optax.__file__).read_bytes(), np.uint8)
STEPS = 40
CONFIG = {
    "run": {"dir": "runs/resumed_loop", "steps": STEPS},
    "batch": {"microbatches": 8, "microbatch_size": 2},
    "data": {"sequence_length": 64},
    "checkpoint": {"every_steps": 10},
}


def batch(step):
    """Bytes of a text and those that follow, by the number of the step: [16, 64] each."""
    starts = np.random.default_rng(step).integers(len(TEXT) - 65, size=16)
    windows = np.stack([TEXT[start : start + 65] for start in starts])
    return windows[:, :-1], windows[:, 1:]


model = build(preset="tiny", sequence_length=64, vocab_size=256)
with jaxmorph.Trainer(model, CONFIG, resume=True) as trainer:
    signal.signal(signal.SIGTERM, lambda *_: trainer.ask_to_stop())
    while trainer.next_step < STEPS:
        metrics = trainer.step(batch(trainer.next_step))
        if metrics.stopped:
            break
        if trainer.rank == 0 and metrics.step % 10 == 9:
            print(f"step {metrics.step}: loss {metrics.loss:.3f} in {metrics.step_s:.3f} s")
if trainer.next_step < STEPS:
    sys.exit(143)  # as `jaxmorph train` does: a scheduler should start it again
