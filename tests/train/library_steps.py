"""A script that uses jaxmorph as a library: the docs' example, then a few steps to compare.

`library_steps.py FOLDER` writes what each rank has found there, `rank_N.json` and `rank_N.npz`.
"""

import json
import runpy
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import jax
import numpy as np
import optax

import jaxmorph

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SEED, VOCABULARY, LENGTH, STEPS, CLIP_NORM = 3, 61, 12, 4, 0.5
CONFIG = {
    "run": {"seed": SEED},
    "data": {"sequence_length": LENGTH},
    "batch": {"microbatches": 4, "microbatch_size": 2},
    "schedule": {"name": "zb-h1"},
    "optimizer": {"clip_norm": CLIP_NORM},  # below the gradients' norm: clipping is at work
}
FAILS_IN = 2
CARD_FAILS = {
    "failover": {"enabled": True},
    "timeouts": {"direct_s": 3},
    "emulation": {
        "links": [{"between": [0, 1], "cut": True, "route": "direct", "from_step": FAILS_IN}]
    },
}
# Adam divides a gradient by its own size: an epsilon well above rounding keeps it from deciding.
OPTIMIZER = optax.adamw(1e-2, eps=1e-3, weight_decay=0.1)


def build_model():
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    sizes = {"sequence_length": LENGTH, "vocab_size": VOCABULARY, "width": 16, "num_layers": 5}
    return import_module("causal_mixer").build(preset="tiny", **sizes)


def batches():
    random = np.random.default_rng(1)
    for _ in range(STEPS):
        tokens = random.integers(VOCABULARY, size=(8, LENGTH + 1))
        yield tokens[:, :-1], np.where(random.random((8, LENGTH)) < 0.2, -1, tokens[:, 1:])


def piped(**sections):
    """A trainer's metrics, and its rank's parameters in the end."""
    with jaxmorph.Trainer(build_model(), CONFIG | sections, optimizer=OPTIMIZER) as trainer:
        assert trainer.plan is None
        evaluated = [trainer.evaluate(batch) for batch in batches()]
        refused = refusal(trainer, [tokens[1:] for tokens in next(batches())])
        metrics, states = [], []
        for batch in batches():
            states.append(jax.device_get(trainer.state))
            metrics.append(asdict(trainer.step(batch)))
        first_params = named_leaves(trainer.params)
        trainer.restore(states[2], next_step=2)
        again = [asdict(trainer.step(batch)) for batch in list(batches())[2:]]
        (layers,), (params,), plan = trainer.layers, trainer.params, trainer.plan
        assert plan is not None
        found = {
            "rank": trainer.rank,
            "stages": trainer.config.parallelism.stages,
            "layers": list(layers),
            "evaluated": evaluated,
            "refused": refused,
            "metrics": metrics,
            "again": again,
            "same_params": all(
                np.array_equal(leaf, first_params[name])
                for name, leaf in named_leaves(trainer.params).items()
            ),
            "schedule": plan.schedule.name,
            "timed_ops": trainer.timeline and [len(row) for row in trainer.timeline.orders],
        }
        return found, named_leaves(params)


def refusal(trainer, batch):
    try:
        trainer.step(batch)
    except jaxmorph.UserError as error:
        return str(error)


def named_leaves(params):
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sys.path.append(str(EXAMPLES))
    jaxmorph.join(fails_over=True)  # as only the links of the second trainer do
    runpy.run_path(str(EXAMPLES / "own_loop.py"))
    found, params = piped(**CARD_FAILS)
    (folder / f"rank_{found['rank']}.json").write_text(json.dumps(found))
    np.savez(folder / f"rank_{found['rank']}.npz", allow_pickle=False, **params)
