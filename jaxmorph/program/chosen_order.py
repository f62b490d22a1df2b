"""A schedule's order as ranks would choose it themselves, if all messages came as planned."""

from typing import NamedTuple

from jaxmorph.program.instructions import Route, Transfer
from jaxmorph.program.leeway import with_leeway
from jaxmorph.program.lowering import lower
from jaxmorph.program.online_replay import replay_online
from jaxmorph.schedule.costs import Limits, Link, Links, LinkState, StageCosts
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulator import simulate


class Reordered(NamedTuple):
    """A schedule that stands for another one.

    Attributes:
        makespan_ms: How long it takes, milliseconds.
        longer: How much longer than the other one, as a share of that.
    """

    schedule: Schedule
    makespan_ms: float
    longer: float


def order_chosen_by_ranks(
    schedule: Schedule, costs: StageCosts, links: Links, limits: Limits
) -> Reordered:
    """The schedule that free ranks make, which prefer one op to another without a plan.

    Args:
        schedule: A planned one, with one chunk.
        costs: Durations of the ops, milliseconds.
        links: State of the links, milliseconds; all of them are delegated.
    """
    planned = simulate(schedule, costs, links)
    hops = (Link(rank, rank + 1) for rank in range(schedule.num_stages - 1))
    routes: dict[Link, Route] = dict.fromkeys(hops, "delegated")
    memory = limits.stage_memory(schedule.num_stages, schedule.num_microbatches)
    programs = with_leeway(lower(schedule, planned, routes), planned, memory)
    chosen = replay_online(
        programs, costs, lambda transfer, _: _delay_ms(transfer, links), left_plan=True
    )
    found = Schedule(schedule.name, schedule.num_microbatches, chosen.orders)
    makespan_ms = simulate(found, costs, links).makespan_ms
    return Reordered(found, makespan_ms, makespan_ms / planned.makespan_ms - 1)


def _delay_ms(transfer: Transfer, links: Links) -> float:
    state = links.get(transfer.link, LinkState())
    if transfer.source < transfer.destination:
        return state.forward_latency_ms + state.forward_occupancy_ms
    return state.backward_latency_ms + state.backward_occupancy_ms
