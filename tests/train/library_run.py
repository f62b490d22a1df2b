"""A script whose runs adapt, save and resume: `library_run.py FOLDER [plain] [begin] [resume]`.

Each rank writes what it has found in each run to `WHAT_rank_N.json` there.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
from library_steps import LENGTH, OPTIMIZER, SEED, VOCABULARY, build_model

import jaxmorph

STEPS, SAVED_EVERY, ENDED_AFTER = 20, 6, 14
SLOW_FROM, LATENCY_MS, OP_MS = 3, 40, 12
CONFIG = {
    "run": {"seed": SEED, "steps": STEPS},
    "data": {"sequence_length": LENGTH},
    "batch": {"microbatches": 8, "microbatch_size": 1},
    "schedule": {"name": "zb-h2"},
}
PACE = dict.fromkeys(("forward_ms", "backward_input_ms", "backward_weight_ms"), OP_MS)
SLOW = {"between": [1, 2], "latency_ms": LATENCY_MS, "from_step": SLOW_FROM}
ADAPTS = {
    "adaptation": {"enabled": True, "worth": 0.25},
    "checkpoint": {"every_steps": SAVED_EVERY},
    "emulation": {"accelerator": PACE, "links": [SLOW]},
}


def batch(step):
    tokens = np.random.default_rng(step).integers(VOCABULARY, size=(8, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def run(folder, what):
    written = {"run": {**CONFIG["run"], "dir": str(folder / "run")}}
    config = CONFIG if what == "plain" else CONFIG | ADAPTS | written
    last = ENDED_AFTER if what == "begin" else STEPS
    resume, evaluated = what == "resume", {}
    with jaxmorph.Trainer(build_model(), config, optimizer=OPTIMIZER, resume=resume) as trainer:
        first, metrics = trainer.next_step, []
        while trainer.next_step < last:
            metrics.append(asdict(trainer.step(batch(trainer.next_step))))
            if trainer.next_step == ENDED_AFTER:
                evaluated[ENDED_AFTER] = trainer.evaluate(batch(0))
        found = {"first": first, "metrics": metrics, "evaluated": evaluated}
        (folder / f"{what}_rank_{trainer.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    jaxmorph.join(fails_over=True)  # links of the first trainer may not
    for what in sys.argv[2:]:
        run(Path(sys.argv[1]), what)
