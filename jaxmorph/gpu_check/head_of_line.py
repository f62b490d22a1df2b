"""Whether a stage computes on while what it has sent is held up in the link."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from jaxmorph.gpu_check.report import Row
from jaxmorph.gpu_check.settings import CheckSettings
from jaxmorph.gpu_check.stage_pipeline import stage_programs
from jaxmorph.gpu_check.stage_processes import WITHIN_S, StageResult, run_stages
from jaxmorph.gpu_check.stage_task import NUM_STAGES, StageTask
from jaxmorph.gpu_check.two_stages import copy_rows
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.schedule.costs import Route, StageCosts, chain_links

LARGEST_SHARE = 0.1
"""Of the delay, by which a message may hold up the work behind it. Work that waited for the message
would be held up by all of it. What is left is dispatching the copy, some 0.1 ms, and for ways that
copy on the work's own stream the copy too, of 1 MiB, for which PCIe 5 takes 0.02 ms."""


@dataclass(frozen=True)
class HeadOfLineReport:
    """What a slow link costs.

    Attributes:
        sizes: Of the model, in words.
        delay_ms: How much later messages come than they would, both ways.
        on_way_ms: How long a message took, by median.
        alone_ms: How long work takes that reads nothing of it, by median.
        held_up_ms: How much longer the same work takes right behind a message that is sent, by the
            median of rounds with and without one, which take turns.
        step_ms: Of a step without the delay and with it, on the slower stage, by median.
        idle: For each stage, the shares of these steps in which it had no op to run.
        simulated_ms: Of a step with the delay: by sidecars, where nothing waits for a message but
            what reads it, and with transfers that hold the queues of both stages until they are
            over. Of its ops as long as they were without the delay.
        copies: For each stage how messages were copied, with counts, and what it has warned of.
    """

    sizes: str
    delay_ms: float
    on_way_ms: float
    alone_ms: float
    held_up_ms: float
    step_ms: dict[str, float]
    idle: list[dict[str, float]]
    simulated_ms: dict[str, float]
    copies: list[dict[str, Any]]

    def rows(self) -> Iterator[Row]:
        """What is asked first."""
        yield Row("model", "float32", self.sizes)
        late = bool(self.on_way_ms >= self.delay_ms)
        told = f"at least {self.delay_ms:g} ms, which the link is told to take"
        yield Row("a message on its way", f"{self.on_way_ms:.1f} ms", told, late)
        yield Row("work without a message", f"{self.alone_ms:.2f} ms")
        most_ms = LARGEST_SHARE * self.delay_ms
        told = f"at most {most_ms:g} ms, {LARGEST_SHARE:.0%} of the delay"
        holds = bool(self.held_up_ms <= most_ms)
        yield Row("held up by one before it", f"{self.held_up_ms:.2f} ms", told, holds)
        yield Row("a step without delay", f"{self.step_ms['without']:.1f} ms")
        beside, blocking = (self.simulated_ms[route] for route in ("delegated", "direct"))
        told = f"simulated: {beside:.1f} ms; {blocking:.1f} ms if transfers held up what is behind"
        yield Row("a step with the delay", f"{self.step_ms['with']:.1f} ms", told)
        for stage, idle in enumerate(self.idle):
            told = f"of a step with the delay; {idle['without']:.0%} without"
            yield Row(f"stage {stage}: idle", f"{idle['with']:.0%}", told)
        yield from copy_rows(self.copies)


def measure_head_of_line(settings: CheckSettings) -> HeadOfLineReport:
    """Have two processes send over a link that is slow.

    JAX doesn't join them: that isn't looked at here, and is more that could fail.

    Args:
        settings: The model's sizes, how often, and the delay.
    """
    task = StageTask(
        "delay",
        False,
        settings.parity,
        num_steps=settings.num_delayed_steps,
        num_sends=settings.num_sends,
        delay_ms=settings.delay_ms,
    )
    return report_of(task, run_stages(task, within_s=min(WITHIN_S, settings.left_s)))


def report_of(task: StageTask, stages: Sequence[StageResult]) -> HeadOfLineReport:
    """What both stages' processes have found, put together."""
    sender, receiver = (stage.figures for stage in stages)
    steps = [stage.figures["steps"] for stage in stages]
    times_ms = list(zip(sender["alone_ms"], sender["behind_ms"], strict=True))
    costs = _costs(steps)
    return HeadOfLineReport(
        sizes=str(task.sizes),
        delay_ms=task.delay_ms,
        on_way_ms=median(receiver["on_way_ms"]),
        alone_ms=median(sender["alone_ms"]),
        held_up_ms=median(behind - alone for alone, behind in times_ms),
        step_ms={how: max(each[how]["step_ms"] for each in steps) for how in ("without", "with")},
        idle=[{how: each[how]["idle"] for how in ("without", "with")} for each in steps],
        simulated_ms={
            "delegated": _simulated_ms("delegated", costs, task.delay_ms),
            "direct": _simulated_ms("direct", costs, task.delay_ms),
        },
        copies=[stage.figures["copies"] for stage in stages],
    )


def _costs(steps: Sequence[dict[str, Any]]) -> StageCosts:
    """What ops took without the delay."""
    ops = [each["without"]["op_ms"] for each in steps]
    return StageCosts(*(tuple(own[kind] for own in ops) for kind in ("F", "B", "W")))


def _simulated_ms(route: Route, costs: StageCosts, delay_ms: float) -> float:
    """A step with its exchange of tied gradients after the last op, there and back."""
    programs, links = stage_programs(route, num_tied=1), chain_links([delay_ms] * (NUM_STAGES - 1))
    return simulate_blocking(programs, costs, links).makespan_ms + 2 * delay_ms
