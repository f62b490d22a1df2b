"""The messages of made-up rounds of a comparison, as rank 0 sends them."""

import numpy as np

from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.timeline import Timeline

PLAN = {
    "predicted_ms": 390.0, "lower_bound_ms": 380.0, "schedule": "zb-h2", "warmup_forwards": [3, 1],
    "routes": {"0-1": "direct"}, "regime": "holds queues",
}  # fmt: skip


def steps(condition: int, *step_ms: float) -> dict:
    """Rank 0's message about a round of two stages; the second is blocked for a tenth of it."""
    count = len(step_ms)
    end = np.array([max(step_ms)])
    timeline = Timeline(((Op.parse("F0"),),), (np.array([0.0]),), (end,))
    return {
        "kind": "RoundMeasured", "condition": condition, "step_ms": list(step_ms),
        "loss": [5.0 - at for at in range(count)], "bubble_rate": [0.25] * count,
        "blocking": [[0.0, 0.1]] * count, "dependency": [[0.2, 0.1]] * count,
        "other": [[0.01, 0.02]] * count, "events": {"lane_down": 1},
        "peak_on_device": [[3, 1]] * (count - 1) + [[2, 2]],
        "timeline": timeline.to_json(), "timeline_ms": sorted(step_ms)[count // 2],
    }  # fmt: skip
