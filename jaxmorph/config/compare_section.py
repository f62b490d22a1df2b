"""The section of a configuration that names what to compare: systems, and conditions of links."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import Field

from jaxmorph.config.link_problems import emulated_link_problems, link_trace_problems
from jaxmorph.config.link_sections import TRACE_EXPECTED, EmulatedLink, LinkTrace
from jaxmorph.config.problems import Problem, mismatch
from jaxmorph.config.sections import Count, CountOrZero, Expected, Positive, Section, Text

SystemName = Literal[
    "gpipe",
    "1f1b",
    "interleaved",
    "zb",
    "zb-delegated",
    "adaptive-direct",
    "adaptive",
    "adaptive-detecting",
    "adaptive-capped",
    "adaptive-offload",
    "restart",
    "restart-cold",
]
_SYSTEMS = ", ".join(get_args(SystemName))
_STILL_TO_COME = "(falcon is not available yet)"
_RESTARTING = ("restart", "restart-cold")
_TOLD_NOTHING = ("gpipe", "1f1b", "zb", "zb-delegated", "adaptive-detecting", *_RESTARTING)
HEALTHY = "healthy"


class Condition(Section):
    """A state of the links; one that names none is healthy.

    What its `trace` says comes on top of `links`. Each round of the condition begins it anew: its
    times with the round, its steps with the round's first one. A regime is drawn anew for each
    round, with the next seed; all systems meet the same.
    """

    name: Text
    links: Annotated[
        tuple[EmulatedLink, ...],
        Field(strict=False),
        Expected("a list of links, such as [{between: [2, 3], latency_ms: 30}]"),
    ] = ()
    trace: Annotated[LinkTrace | None, TRACE_EXPECTED] = None


class Compare(Section):
    """Which systems to run under which conditions, and for how long.

    A system first runs `profiling_steps` on healthy links, from which it plans and predicts. Then
    rounds of `warmup_steps` and `steps` are run for each condition in turn, `repeats` times. A run
    whose p90 / p10 is above `largest_spread` is called noisy, but for one under a trace, whose
    steps differ because delays do. `reference` is somebody else's step in ms under each condition,
    for a system.

    With a system that restarts it is a comparison of whole runs: each system under each condition
    is a run of its own, of `steps` steps, and its conditions may cut links, from step to step.
    """

    systems: Annotated[
        tuple[SystemName, ...],
        Field(strict=False, min_length=1),
        Expected(f"a list of systems among {_SYSTEMS} {_STILL_TO_COME}"),
    ] = ("1f1b", "zb", "zb-delegated", "adaptive")
    conditions: Annotated[
        tuple[Condition, ...],
        Field(strict=False, min_length=1),
        Expected("a list of conditions, each with a name and, unless it is healthy, links"),
    ]
    steps: Count = 10
    warmup_steps: CountOrZero = 2
    repeats: Count = 2
    profiling_steps: CountOrZero = 8
    largest_spread: Annotated[float, Field(gt=1), Expected("a number above 1")] = 1.15
    reference: Annotated[
        dict[SystemName, Annotated[tuple[Positive | None, ...], Field(strict=False)]],
        Expected(f"by system ({_SYSTEMS}), a list of ms above 0 or null for each condition"),
    ] = Field(default_factory=dict)
    reference_source: Annotated[str, Expected("text")] = ""

    @property
    def healthy(self) -> int:
        """Which condition the others are held against: the one of that name, or the first."""
        names = [condition.name for condition in self.conditions]
        return names.index(HEALTHY) if HEALTHY in names else 0

    @property
    def has_whole_runs(self) -> bool:
        """Whether each system under each condition is a run of its own, restarts included."""
        return bool(self.restarting)

    @property
    def restarting(self) -> tuple[SystemName, ...]:
        """The systems that start again from their last checkpoint when a rank fails."""
        return tuple(system for system in self.systems if system in _RESTARTING)

    @property
    def total_steps(self) -> int:
        """Optimizer steps that one system trains for, the measured ones and the others."""
        rounds = self.repeats * len(self.conditions) * (self.warmup_steps + self.steps)
        return self.profiling_steps + rounds


def compare_problems(compare: Compare, num_stages: int) -> Iterator[Problem]:
    """What the section contradicts itself or the pipeline in."""
    names = Counter(condition.name for condition in compare.conditions)
    for name in (name for name, count in names.items() if count > 1):
        yield Problem("compare.conditions", f"got {name!r} twice, expected different names")
    if len(set(compare.systems)) < len(compare.systems):
        yield mismatch("compare.systems", list(compare.systems), "each system once")
    told = [system for system in compare.systems if system not in _TOLD_NOTHING]
    if compare.has_whole_runs and told:
        expected = f"beside one that restarts only some of {', '.join(_TOLD_NOTHING)}"
        yield mismatch("compare.systems", list(compare.systems), expected)
    for index, condition in enumerate(compare.conditions):
        key = f"compare.conditions.{index}.links"
        yield from emulated_link_problems(key, condition.links, num_stages)
        yield from link_trace_problems(f"compare.conditions.{index}.trace", condition.trace)
        for at, link in enumerate(() if compare.has_whole_runs else condition.links):
            yield from _span_problems(f"{key}.{at}", link)
    count = len(compare.conditions)
    for system, steps_ms in compare.reference.items():
        if len(steps_ms) != count:
            expected = f"a list of {count}, one for each of compare.conditions"
            yield mismatch(f"compare.reference.{system}", list(steps_ms), expected)


def _span_problems(key: str, link: EmulatedLink) -> Iterator[Problem]:
    """A condition holds for as long as its steps last; over a cut link none of them would end."""
    for name in ("cut", "from_step", "to_step"):
        value = getattr(link, name)
        if value != EmulatedLink.model_fields[name].default:
            yield mismatch(f"{key}.{name}", value, "nothing: not for a condition to compare under")
