"""What is captured: lowered programs, stages and short runs; planning problems: problems.jsonl."""

from dataclasses import dataclass
from typing import Any

SCHEDULES = (
    "gpipe", "1f1b", "1f1b-eager", "zb-h1", "zb-h2", "interleaved", "paper", "adaptive", "initial",
)  # fmt: skip

# Three stages and six microbatches of each schedule, lowered in each of these ways.
LOWERED: dict[str, dict[str, Any]] = {
    "direct, tied": {"routes": {}, "tied": 2, "memory": None},
    "delegated": {
        "routes": {"0-1": "delegated", "1-2": "delegated", "0-2": "delegated"},
        "tied": 0,
        "memory": None,
    },
    "one link delegated, offload": {
        "routes": {"1-2": "delegated"},
        "tied": 1,
        "memory": (4, 1, 9),  # after F, after B, and room on the device
    },
}
LINK_MS = [15, 0]

# Stages of models without dropout, auxiliary losses, extras, masks or inputs of floats: what stages
# with them need must change nothing for these.
STAGES: list[dict[str, Any]] = [
    {
        "name": f"{factory} in {dtype}, {place} stage",
        "factory": factory,
        "model": {
            "preset": "tiny", "sequence_length": 8, "vocab_size": 32, "compute_dtype": dtype,
            "attention": "xla",
        },
        "shape": (2, 8),  # sequences and tokens of a microbatch
        "place": {"num_layers": 2, "is_first": place == "first", "is_last": place == "last"},
    }
    for factory, dtype in (("models.gpt2", "float32"), ("models.llama", "bfloat16"))
    for place in ("first", "middle", "last")
]  # fmt: skip

BASE: dict[str, Any] = {
    "run": {"steps": 3, "seed": 5},
    "model": {"preset": "tiny", "width": 16, "num_layers": 2, "num_heads": 2},
    "parallelism": {"stages": 2},
    "batch": {"microbatches": 4, "microbatch_size": 1},
    "optimizer": {"learning_rate": 1e-3},
    "trace": {"every_steps": 0},
}


def _paced(ms: int) -> str:
    times = f"forward_ms: {ms}, backward_input_ms: {ms}, backward_weight_ms: {ms}"
    return f"emulation.accelerator={{{times}}}"


@dataclass(frozen=True)
class Run:
    """A short run, and what of it does not hang on timing.

    Args:
        overrides: What differs from BASE, as on the command line.
        planned: Whether its plan is always the same, and so is compared.
        kinds: Kinds of events of which is compared whether they occurred; None: all, in order.
        fails: Whether a link or a rank fails, after which programs may be compiled again.
        is_killed: Whether a rank is killed after the third step.
        exported: Whether the model has weights to export, of which digests are compared.
    """

    name: str
    overrides: tuple[str, ...]
    planned: bool = True
    kinds: tuple[str, ...] | None = None
    fails: bool = False
    is_killed: bool = False
    exported: bool = True


RUNS = (
    Run("gpipe, direct, tied", ("schedule.name=gpipe",)),
    Run(
        "1f1b, delegated, untied",
        ("schedule.name=1f1b", "routes.default=delegated", "model.tied=false"),
    ),
    Run("1f1b-eager, direct, untied", ("schedule.name=1f1b-eager", "model.tied=false")),
    Run("zb-h1, delegated, tied", ("schedule.name=zb-h1", "routes.default=delegated")),
    Run(
        "zb-h2, three stages, a route each, saved and evaluated",
        (
            "schedule.name=zb-h2", "parallelism.stages=3", "model.num_layers=3",
            "routes.1-2=delegated", "checkpoint.every_steps=1", "data.held_out_fraction=0.1",
            "evaluation.every_steps=2",
        ),
    ),
    Run(
        "interleaved, delegated, tied",
        (
            "schedule.name=interleaved", "parallelism.chunks=2", "model.num_layers=4",
            "routes.default=delegated",
        ),
    ),
    Run(
        "paper, direct, untied, recompute",
        ("schedule.name=paper", "model.tied=false", "stash=recompute"),
        planned=False,
    ),
    Run(
        "adaptive, delegated, tied, offload",
        (
            "schedule={name: adaptive, max_live: 1}", "routes.default=delegated",
            "offload.enabled=true", "batch.microbatches=6",
        ),
        planned=False,
    ),
    Run(
        "llama in bfloat16, one stage",
        ("model={factory: models.llama, preset: tiny, num_layers: 2}", "parallelism.stages=1",
         "schedule.name=1f1b", "precision.compute=bfloat16"),
        exported=False,
    ),
    Run(
        "morph",
        (
            "run.steps=14", "batch.microbatches=8", "schedule.name=zb-h2",
            "adaptation={enabled: true, worth: 0.1}", _paced(12),
            "emulation.links=[{between: [0, 1], latency_ms: 60, from_step: 4}]",
        ),
        planned=False,
        kinds=("straggler_detected", "plan_changed", "route_changed", "link_failed"),
    ),
    Run(
        "failover in mid-step",
        (
            "schedule.name=1f1b", "failover.enabled=true", "timeouts.direct_s=1.0", "run.steps=4",
            "emulation.links=[{between: [0, 1], cut: true, route: direct, from_step: 2}]",
        ),
        planned=False,
        kinds=("link_failed", "route_changed", "plan_changed", "rank_failed"),
        fails=True,
    ),
    Run(
        "restart",
        (
            "schedule.name=1f1b", "run.steps=10", "checkpoint.every_steps=2",
            "restart_policy.backoff_s=0.1", _paced(20),
        ),
        kinds=("rank_failed", "resumed", "restarted"),
        fails=True,
        is_killed=True,
    ),
)  # fmt: skip
