"""The paper's own schedule: its warm-ups, then B before F before W."""

from collections.abc import Sequence

from jaxmorph.schedule.costs import Limits, Links, StageCosts
from jaxmorph.schedule.list_schedule import PAPER, list_schedule
from jaxmorph.schedule.numbering import to_schedule
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.workload import make_workload


def select_ops(
    costs: StageCosts,
    links: Links,
    limits: Limits,
    num_microbatches: int,
    warmup_forwards: Sequence[int],
    name: str = "paper",
) -> Schedule:
    """The schedule that greedy selection makes: warm up, then B before F before W.

    It always completes: a warm-up is no longer than what earlier stages can send without a
    backward, and after it a stage at its cap holds either a microbatch whose B will come or one
    whose W can run.

    Source: Algorithms 3 and 4, corrected as ``list_schedule`` says.

    Args:
        costs: Durations of the ops, milliseconds.
        links: Latencies between neighbouring stages, milliseconds.
        warmup_forwards: Forwards each stage runs before any backward: non-increasing, from 1 to N,
            and within the caps of all earlier stages. A stage may run more before its first B.

    Returns:
        A valid schedule whose stages hold no more than their caps.
    """
    workload = make_workload(costs, links, limits, num_microbatches)
    made = list_schedule(workload, PAPER, warmup_forwards)
    if made is None:
        raise ValueError(f"warmup_forwards: got {warmup_forwards}, which no stage can hold")
    return to_schedule(name, costs.num_stages, num_microbatches, made.numbers)
