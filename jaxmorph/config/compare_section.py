"""The section that names what `jaxmorph compare` compares: systems, under conditions of links."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from jaxmorph.config.link_problems import (
    emulated_host_problems,
    emulated_link_problems,
    link_trace_problems,
)
from jaxmorph.config.link_sections import (
    TRACE_EXPECTED,
    EmulatedHostPairs,
    EmulatedLink,
    EmulatedLinks,
    LinkTrace,
)
from jaxmorph.config.problems import Problem, mismatch
from jaxmorph.config.sections import (
    Count,
    CountOrZero,
    Expected,
    Parallelism,
    Positive,
    Section,
    Text,
)

_Name = Literal[
    "gpipe",
    "1f1b",
    "interleaved",
    "zb-v",
    "zb",
    "zb-delegated",
    "zb-opportunistic",
    "adaptive",
    "adaptive-informed",
    "adaptive-direct",
    "adaptive-capped",
    "adaptive-offload",
    "falcon",
    "restart",
    "restart-cold",
    "restart-zb",
]
SYSTEM_NAMES: tuple[str, ...] = get_args(_Name)
_FORMER_NAMES = {"adaptive-detecting": "adaptive"}


def _current(name: Any) -> Any:
    return _FORMER_NAMES.get(name, name) if isinstance(name, str) else name


def _named_once(by_system: Any) -> Any:
    """Refuses a system under both its names, one of which would be lost."""
    if isinstance(by_system, Mapping) and len({*map(_current, by_system)}) < len(by_system):
        raise ValueError("a system is there under both its names")
    return by_system


SystemName = Annotated[_Name, BeforeValidator(_current)]
_SYSTEMS = ", ".join(SYSTEM_NAMES)
Systems = Annotated[
    tuple[SystemName, ...],
    Field(strict=False, min_length=1),
    Expected(f"a list of systems among {_SYSTEMS}"),
]
_RESTARTING = ("restart", "restart-cold", "restart-zb")
# Whole runs are made as `jaxmorph train` makes them. So they exclude systems that are given a
# condition's latencies, as other comparisons do between rounds.
_ONLY_WHOLE = ("falcon", *_RESTARTING)
_WHOLE_RUN_SYSTEMS = ("gpipe", "1f1b", "zb", "zb-delegated", "adaptive", *_ONLY_WHOLE)
HEALTHY, PREDICTION, LOWER_BOUND = "healthy", "prediction", "lower bound"
"""What a bar may compare a system with, apart from another system."""


class Condition(Section):
    """A state of the links; without `links` and `trace` they are healthy."""

    name: Text
    """Names the condition in tables and figures."""

    links: EmulatedLinks = ()
    """Emulated links, as in `emulation.links`."""

    hosts: EmulatedHostPairs = ()
    """Pairs of hosts, as in `emulation.hosts`; with any, each system is a run of its own."""

    trace: Annotated[LinkTrace | None, TRACE_EXPECTED] = None
    """Links that change, on top of `links`. The trace starts again with each round; a regime takes
    the next seed for each round, the same for all systems."""

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is slow."""
        return not self.links and not self.hosts and self.trace is None


class Bar(Section):
    """What the runs of a comparison should meet: limits of a value, or of a ratio of two values.

    The bar applies to each of `systems` under each of `conditions`.
    """

    systems: Systems
    """The systems to which the bar applies."""

    conditions: Annotated[
        Annotated[tuple[Text, ...], Field(strict=False)] | None,
        Expected("null, or a list of names of conditions"),
    ] = None
    """The conditions under which it applies; null: all."""

    value: Literal["step", "total", "blocked", "waiting", "on device"] = "step"
    """`step`: the median step; `total`: all steps together; `blocked`: the largest share of the
    step in which a transfer blocks a stage; `waiting`: that in which a ready op waits, for whatever
    reason; `on device`: the most microbatches whose stash a device held at once."""

    over: Annotated[
        SystemName | Literal["healthy", "prediction", "lower bound"] | None,
        Expected(f"null, healthy, prediction, lower bound, or a system among {_SYSTEMS}"),
    ] = None
    """What the value is divided by. A system: its value under this condition; `healthy`: the same
    system's value under the healthy condition; `prediction`: the predicted step; `lower bound`: its
    lower bound. Null: nothing."""

    at_least: Annotated[float | None, Expected("null, or a number")] = None
    """The lower limit."""

    at_most: Annotated[float | None, Expected("null, or a number")] = None
    """The upper limit."""


class Compare(Section):
    """Which systems `jaxmorph compare` runs under which conditions, and for how long.

    With a system that restarts, with `falcon`, or with `hosts` in a condition, each system under
    each condition is a run of its own, of `steps` steps, and conditions may cut links and change
    them from step to step.
    """

    systems: Systems = ("1f1b", "zb", "zb-delegated", "adaptive")
    """The systems, see docs/how-to/compare.md. `adaptive-detecting` is a former name of
    `adaptive`."""

    conditions: Annotated[
        tuple[Condition, ...],
        Field(strict=False, min_length=1),
        Expected("a list of conditions, each with a name and, unless it is healthy, links"),
    ]
    """The conditions, which take turns so that other load on the machine affects all alike."""

    steps: Count = 10
    """Measured steps in a round of a condition."""

    warmup_steps: CountOrZero = 4
    """Unmeasured steps before them. `adaptive` needs 4 to detect slow links and change its plan;
    for others 2 are enough."""

    repeats: Count = 2
    """Rounds of each condition. The systems take turns: one launch of a system is one round of all
    conditions, a block, and begins from the same parameters. Finished blocks are kept if a
    comparison ends early."""

    profiling_steps: CountOrZero = 8
    """Steps on healthy links at the start of each block, for the costs that its plans use."""

    largest_spread: Annotated[float, Field(gt=1), Expected("a number above 1")] = 1.15
    """A run whose 90th percentile of steps is more than this times its 10th is marked noisy, except
    under a trace, where steps differ because delays do."""

    bars: Annotated[tuple[Bar, ...], Field(strict=False), Expected("a list of bars")] = ()
    """What the runs should meet; the comparison prints whether each bar is met or missed."""

    reference: Annotated[
        dict[SystemName, Annotated[tuple[Positive | None, ...], Field(strict=False)]],
        BeforeValidator(_named_once),
        Expected(f"by system ({_SYSTEMS}), a list of ms above 0 or null for each condition"),
    ] = Field(default_factory=dict)
    """Published steps to show beside the measured ones: by system, a list of milliseconds with one
    entry, or null, per condition."""

    reference_source: Annotated[str, Expected("text")] = ""
    """Where `reference` is from."""

    @property
    def healthy(self) -> str | None:
        """The condition that slowdowns are relative to: the first without links and trace."""
        healthy = (each.name for each in self.conditions if each.is_healthy)
        return next(healthy, None)

    @property
    def has_whole_runs(self) -> bool:
        """Whether each system under each condition is a run of its own, with its restarts."""
        slow_hosts = any(condition.hosts for condition in self.conditions)
        return slow_hosts or any(system in _ONLY_WHOLE for system in self.systems)

    @property
    def restarting(self) -> tuple[SystemName, ...]:
        """The systems that restart from their last checkpoint when a rank fails."""
        return tuple(system for system in self.systems if system in _RESTARTING)

    @property
    def num_blocks(self) -> int:
        """The number of blocks of each system; a whole run is a block of its own."""
        return len(self.conditions) if self.has_whole_runs else self.repeats

    @property
    def total_steps(self) -> int:
        """Optimizer steps of one system in a block, measured or not."""
        return self.profiling_steps + len(self.conditions) * (self.warmup_steps + self.steps)


def compare_problems(compare: Compare, cut: Parallelism, num_hosts: int) -> Iterator[Problem]:
    """Yields the contradictions within the section, and with the pipeline."""
    if cut.data > 1 and not compare.has_whole_runs:
        alone = ", ".join(_ONLY_WHOLE)
        expected = (
            f"1, or one of {alone} among compare.systems, or compare.conditions with hosts: then "
            "each run starts ranks"
        )
        yield mismatch("parallelism.data", cut.data, expected)
    names = Counter(condition.name for condition in compare.conditions)
    for name in (name for name, count in names.items() if count > 1):
        yield Problem("compare.conditions", f"got {name!r} twice, expected different names")
    if len(set(compare.systems)) < len(compare.systems):
        former = "adaptive-detecting is adaptive now, and the informed one adaptive-informed"
        expected = f"each system once{f': {former}' * (compare.systems.count('adaptive') > 1)}"
        yield mismatch("compare.systems", list(compare.systems), expected)
    others = [system for system in compare.systems if system not in _WHOLE_RUN_SYSTEMS]
    if compare.has_whole_runs and others:
        expected = (
            f"only {', '.join(_WHOLE_RUN_SYSTEMS)} beside {' or '.join(_ONLY_WHOLE)}, and where "
            "compare.conditions have hosts"
        )
        yield mismatch("compare.systems", list(compare.systems), expected)
    for index, condition in enumerate(compare.conditions):
        key = f"compare.conditions.{index}.links"
        yield from emulated_link_problems(key, condition.links, cut.stages, cut.data)
        yield from link_trace_problems(f"compare.conditions.{index}.trace", condition.trace)
        hosts = f"compare.conditions.{index}.hosts"
        yield from emulated_host_problems(hosts, condition.hosts, num_hosts)
        for at, link in enumerate(() if compare.has_whole_runs else condition.links):
            yield from _span_problems(f"{key}.{at}", link)
    count = len(compare.conditions)
    for system, steps_ms in compare.reference.items():
        if len(steps_ms) != count:
            expected = f"a list of {count}, one for each of compare.conditions"
            yield mismatch(f"compare.reference.{system}", list(steps_ms), expected)

    yield from _bar_problems(compare)


def _bar_problems(compare: Compare) -> Iterator[Problem]:
    """Refuses bars that no run could meet or miss; a bar may name systems that do not run."""
    names = [condition.name for condition in compare.conditions]
    for index, bar in enumerate(compare.bars):
        key = f"compare.bars.{index}"
        if unknown := [name for name in bar.conditions or () if name not in names]:
            expected = f"some of {', '.join(names)} (or no bars: compare.bars=[])"
            yield mismatch(f"{key}.conditions", unknown, expected)
        if bar.at_least is None and bar.at_most is None:
            yield Problem(key, "got no limit, expected at_least, at_most, or both")
        least, most = bar.at_least, bar.at_most
        if least is not None and most is not None and least > most:
            yield mismatch(f"{key}.at_least", least, f"at most at_most, {most:g}")
        if bar in compare.bars[:index]:
            yield Problem(key, "got a bar twice, expected different ones")
        if bar.over == HEALTHY and compare.healthy is None:
            expected = "another one, as no condition is without links and trace"
            yield mismatch(f"{key}.over", bar.over, expected)
        if bar.over in (PREDICTION, LOWER_BOUND) and bar.value != "step":
            yield mismatch(f"{key}.value", bar.value, f"step, as over is {bar.over}")


def _span_problems(key: str, link: EmulatedLink) -> Iterator[Problem]:
    """Refuses spans of steps and cuts: a condition lasts a round, and under a cut no round ends."""
    for name in ("cut", "from_step", "to_step"):
        value = getattr(link, name)
        if value != EmulatedLink.model_fields[name].default:
            expected = f"no {name}: a condition lasts a whole round, over links that deliver"
            yield mismatch(f"{key}.{name}", value, expected)
