"""The results of a comparison, from its blocks, and its notes."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from jaxmorph.compare.blocks import Block, RoundMeasured, all_keys, joint_provenance
from jaxmorph.compare.systems import SYSTEMS
from jaxmorph.config import Config
from jaxmorph.config.compare_section import Compare, Condition
from jaxmorph.config.link_sections import Routes
from jaxmorph.config.sections import Run as RunSection
from jaxmorph.report.bars import judge
from jaxmorph.report.run_matrix import BESIDE, Matrix, PlannedRun, Run, StepTimes
from jaxmorph.report.text import describe_regime, describe_trace

_LISTED = (
    "step_ms", "loss", "bubble_rate", "blocking", "dependency", "other", "peak_on_device",
)  # fmt: skip
_WHOLE = (
    "each system under each condition is a run of {} steps of `jaxmorph train`, with checkpoints; "
    "emulated links change in the same steps for all systems, but a cut link works again after a "
    "restart, as the restarted ranks would use another card"
)


def comparison_matrix(
    compare: Compare, name: str, blocks: Iterable[Block], notes: Mapping[str, str]
) -> Matrix:
    """The results of the blocks so far.

    Args:
        notes: `comparison_notes`.
    """
    places = {key: place for place, key in enumerate(all_keys(compare))}
    blocks = sorted(blocks, key=lambda block: places[block.key])
    make = _whole_runs if compare.has_whole_runs else _runs
    made = [
        run
        for system in compare.systems
        for run in make(compare, system, [block for block in blocks if block.system == system])
    ]
    link, latencies_ms = one_slow_link(compare.conditions)
    runs = {(run.system, run.condition): run for run in made}
    return Matrix(
        name=name,
        systems=tuple(compare.systems),
        conditions=tuple(condition.name for condition in compare.conditions),
        runs=runs,
        latencies_ms=latencies_ms,
        link=link,
        reference_source=compare.reference_source,
        notes=dict(notes),
        informed=tuple(name for name in compare.systems if SYSTEMS[name].is_informed),
        bars=judge(compare, runs),
        provenance=joint_provenance(blocks),
        blocks=tuple(block.load for block in blocks),
    )


def typical_round(blocks: Iterable[Block], condition: int) -> RoundMeasured | None:
    """The round of a system's blocks whose timeline is nearest to the median step of all."""
    rounds = _rounds(blocks, condition)
    if not rounds:
        return None
    middle_ms = median(step_ms for each in rounds for step_ms in each.step_ms)
    return min(rounds, key=lambda each: abs(each.timeline_ms - middle_ms))


def _rounds(blocks: Iterable[Block], condition: int) -> list[RoundMeasured]:
    return [each for block in blocks for each in block.rounds if each.condition == condition]


def _runs(compare: Compare, system: str, blocks: Sequence[Block]) -> Iterator[Run]:
    """The runs of a system, one for each condition, from its blocks in their order."""
    names = [condition.name for condition in compare.conditions]
    healthy = names.index(compare.healthy) if compare.healthy else None
    steps_ms = [
        [step_ms for each in _rounds(blocks, index) for step_ms in each.step_ms]
        for index in range(len(names))
    ]
    healthy_ms = steps_ms[healthy] if healthy is not None else []
    for index, of_steps in enumerate(steps_ms):
        if of_steps or any(block.failure is not None for block in blocks):
            run = _run(compare, system, index, blocks)
            slowdown = median(of_steps) / median(healthy_ms) if of_steps and healthy_ms else None
            yield replace(run, slowdown=slowdown)


def _run(compare: Compare, system: str, index: int, blocks: Sequence[Block]) -> Run:
    condition, rounds = compare.conditions[index], _rounds(blocks, index)
    run = Run(
        system=system,
        condition=condition.name,
        plan=_plan(blocks, index),
        reference_ms=_reference_ms(compare, system, index),
        failed=_failure(compare, blocks, sum(len(each.step_ms) for each in rounds)),
        disturbed=_disturbance(blocks),
        blocks_to_come=compare.num_blocks - len(blocks),
    )
    if not rounds:
        return run
    together = {
        name: [value for each in rounds for value in getattr(each, name)] for name in _LISTED
    }
    step_ms = StepTimes.of(together["step_ms"])
    return replace(
        run,
        step_ms=step_ms,
        bubble_rate=median(together["bubble_rate"]),
        blocking_stall_rate=_medians(together["blocking"]),
        dependency_bubble_rate=_medians(together["dependency"]),
        other_idle_rate=_medians(together["other"]),
        loss=rounds[0].loss[-1],
        failed=run.failed or divergence(together["loss"]),
        noisy=None if condition.trace else _noise(compare, step_ms),
        block_ms=tuple(median(each.step_ms) for each in rounds),
        events=dict(sum((Counter(each.events) for each in rounds), Counter())),
        total_s=sum(together["step_ms"]) / 1e3,
        peak_on_device=_most(together["peak_on_device"]),
        load=tuple(
            load
            for block in blocks
            for each, load in zip(block.rounds, block.load_during, strict=True)
            if each.condition == index
        ),
    )


def _plan(blocks: Iterable[Block], condition: int) -> PlannedRun | None:
    """The plan of the last block, with the medians of what all blocks' plans predict."""
    plans = [plan for block in blocks if (plan := block.plan(condition)) is not None]
    if not plans:
        return None
    return replace(
        plans[-1],
        predicted_ms=median(plan.predicted_ms for plan in plans),
        lower_bound_ms=median(plan.lower_bound_ms for plan in plans),
        around_ops_ms=median(plan.around_ops_ms for plan in plans),
    )


def _reference_ms(compare: Compare, system: str, index: int) -> float | None:
    steps_ms = {str(name): values for name, values in compare.reference.items()}
    return steps_ms[system][index] if system in steps_ms else None


def _failure(compare: Compare, blocks: Sequence[Block], num_steps: int) -> str | None:
    wanted = compare.steps * compare.repeats
    failures = [block.failure for block in blocks if block.failure is not None]
    if not failures or num_steps >= wanted:
        return None
    return f"{num_steps} of {wanted} steps measured: {failures[-1]}"


def _disturbance(blocks: Iterable[Block]) -> str | None:
    """Which blocks were measured beside other work, if any were."""
    loads = [block.load for block in blocks]
    beside = "; ".join(
        f"block {load.block} {BESIDE}, for which {load.others_share:.0%} of the processors' time "
        "was used"
        for load in loads
        if load.is_disturbed
    )
    return beside or None


def _noise(compare: Compare, step_ms: StepTimes) -> str | None:
    if step_ms.spread <= compare.largest_spread:
        return None
    return f"p90 / p10 is {step_ms.spread:.3f}, above {compare.largest_spread:g}"


def _whole_runs(compare: Compare, system: str, blocks: Sequence[Block]) -> Iterator[Run]:
    """The whole runs of a system."""
    names = [condition.name for condition in compare.conditions]
    runs = [(block, block.run) for block in blocks if block.run is not None]
    reference = next((run for _, run in runs if run.condition == compare.healthy), None)
    for block, run in runs:
        mean_ms = _reference_ms(compare, system, names.index(run.condition))
        yield replace(
            run,
            slowdown=_slowdown(run, reference),
            reference_s=None if mean_ms is None else compare.steps * mean_ms / 1e3,
            disturbed=_disturbance([block]),
            load=(block.provenance.load_after or ())[:1],
        )


def _slowdown(run: Run, healthy: Run | None) -> float | None:
    """The ratio of the median steps of two whole runs; their lengths are compared in a table."""
    if run.failed or run.step_ms is None or healthy is None or healthy.step_ms is None:
        return None
    return run.step_ms.median / healthy.step_ms.median


def divergence(losses: Sequence[float]) -> str | None:
    """Why a run counts as failed if its loss diverged; None otherwise."""
    wrong = sum(not math.isfinite(loss) for loss in losses)
    return f"the loss is not finite in {wrong} of {len(losses)} steps" if wrong else None


def one_slow_link(conditions: Sequence[Condition]) -> tuple[str, tuple[float, ...]]:
    """The name and latencies of a link, if at least three conditions differ in nothing else.

    Latencies must rise from condition to condition; otherwise both results are empty.
    """
    if any(condition.trace for condition in conditions):
        return "", ()
    slow = [link for condition in conditions for link in condition.links]
    kinds = {(link.between, link.bandwidth_mbps, link.jitter_ms, link.source) for link in slow}
    if len(conditions) < 3 or len(kinds) != 1 or any(len(c.links) > 1 for c in conditions):
        return "", ()
    latencies_ms = tuple(sum(link.latency_ms for link in c.links) for c in conditions)
    (between, *others) = next(iter(kinds))
    if others != [None, 0.0, None] or list(latencies_ms) != sorted(set(latencies_ms)):
        return "", ()
    return f"{between[0]}-{between[1]}", latencies_ms


def _medians(steps: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The median over steps, for each stage."""
    return tuple(median(stage) for stage in zip(*steps, strict=True))


def _most(steps: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(max(stage) for stage in zip(*steps, strict=True))


def comparison_notes(config: Config, wanted: Compare) -> dict[str, str]:
    """What a reader must know to judge a comparison, by label."""
    emulated = (
        "latency and bandwidth of links are emulated: a direct transfer holds the queues of both "
        "its stages for the delay ('holds queues'); delegated messages in flight overlap, and no "
        "queue waits for them ('overlaps')"
    )
    rounds = f"{wanted.repeats} rounds of {wanted.steps} steps a condition, systems in turn"
    left_out = f"{wanted.warmup_steps} steps before each are left out"
    noisy = f"noisy: p90 / p10 above {wanted.largest_spread:g}"
    healthy = f"{wanted.profiling_steps} healthy steps" if wanted.profiling_steps else "warm-up"
    profiled = f"planned and predicted from {healthy}"
    predicted = (
        "predictions count what lies before a step's first op and after its last as it was in the "
        "healthy steps of the same system"
        if wanted.profiling_steps
        else "predictions end with the last op: tied gradients and the update come after it"
    )
    systems = (SYSTEMS[name] for name in wanted.systems)
    return {
        "systems": "; ".join(f"{system.name}: {system.meaning}" for system in systems),
        "regime": f"{describe_regime(config.emulation)}; {emulated}",
        "steps": _WHOLE.format(wanted.steps)
        if wanted.has_whole_runs
        else f"{profiled}; {rounds}; {left_out}; {noisy}; {predicted}",
        **_traces(wanted),
        **_left_aside(config),
    }


def _traces(wanted: Compare) -> dict[str, str]:
    """The note on traces, if there are any."""
    traces = "; ".join(
        f"{condition.name}: {describe_trace(condition.trace)}"
        for condition in wanted.conditions
        if condition.trace is not None
    )
    meaning = (
        "a trace starts again in each round, the same for all systems; an informed system is given "
        "each link's recent delays before every step; predictions are for the mean delays of the "
        "last round"
    )
    return {"traces": f"{traces}; {meaning}"} if traces else {}


def _left_aside(config: Config) -> dict[str, str]:
    """The note on sections that a comparison ignores, if any are configured."""
    configured = {
        "run.steps": config.run.steps != RunSection().steps,
        "routes": config.routes != Routes(),
        "schedule.link_ms": config.schedule.link_ms is not None,
        "emulation.links": bool(config.emulation.links),
        "emulation.hosts": bool(config.emulation.hosts),
        "emulation.trace": config.emulation.trace is not None,
        "evaluation": config.evaluation.every_steps is not None,
    }
    names = [name for name, is_set in configured.items() if is_set]
    reason = (
        "systems have their own routes and plans, conditions their own links; "
        "compare.steps says how many steps run, and nothing else does"
    )
    return {"left aside": f"{', '.join(names)}: {reason}"} if names else {}
