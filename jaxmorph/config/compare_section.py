"""The section that names what `jaxmorph compare` compares: systems, under conditions of links."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import Field

from jaxmorph.config.link_problems import emulated_link_problems, link_trace_problems
from jaxmorph.config.link_sections import TRACE_EXPECTED, EmulatedLink, EmulatedLinks, LinkTrace
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
_UNAVAILABLE = "(falcon is not available yet)"
_RESTARTING = ("restart", "restart-cold")
# Whole runs are made as `jaxmorph train` makes them, so a system that plans with the condition's
# latencies, as between the rounds of other comparisons, cannot be among them.
_WHOLE_RUN_SYSTEMS = ("gpipe", "1f1b", "zb", "zb-delegated", "adaptive-detecting", *_RESTARTING)
HEALTHY = "healthy"


class Condition(Section):
    """A state of the links; without `links` and `trace` they are healthy."""

    name: Text
    """Names the condition in tables and figures; slowdowns are relative to `healthy`, or to the
    first condition if none has that name."""

    links: EmulatedLinks = ()
    """Emulated links, as in `emulation.links`."""

    trace: Annotated[LinkTrace | None, TRACE_EXPECTED] = None
    """Links that change, on top of `links`. It starts again with each round; a regime takes the
    next seed for each round, the same for all systems."""


class Compare(Section):
    """Which systems `jaxmorph compare` runs under which conditions, and for how long.

    With a system that restarts, each system under each condition is a run of its own, of `steps`
    steps, and conditions may cut links and change them from step to step.
    """

    systems: Annotated[
        tuple[SystemName, ...],
        Field(strict=False, min_length=1),
        Expected(f"a list of systems among {_SYSTEMS} {_UNAVAILABLE}"),
    ] = ("1f1b", "zb", "zb-delegated", "adaptive")
    """The systems, see docs/how-to/compare.md."""

    conditions: Annotated[
        tuple[Condition, ...],
        Field(strict=False, min_length=1),
        Expected("a list of conditions, each with a name and, unless it is healthy, links"),
    ]
    """The conditions, which take turns so that other load on the machine affects all alike."""

    steps: Count = 10
    """Measured steps in a round of a condition."""

    warmup_steps: CountOrZero = 2
    """Unmeasured steps before them; take at least 4 for `adaptive-detecting`, which detects and
    changes its plan in them."""

    repeats: Count = 2
    """Rounds of each condition."""

    profiling_steps: CountOrZero = 8
    """Steps on healthy links at the start of each system, for the costs that it plans with."""

    largest_spread: Annotated[float, Field(gt=1), Expected("a number above 1")] = 1.15
    """A run whose 90th percentile of steps is more than this times its 10th is marked noisy, except
    under a trace, where steps differ because delays do."""

    reference: Annotated[
        dict[SystemName, Annotated[tuple[Positive | None, ...], Field(strict=False)]],
        Expected(f"by system ({_SYSTEMS}), a list of ms above 0 or null for each condition"),
    ] = Field(default_factory=dict)
    """Published steps to show beside the measured ones: by system, a list of milliseconds with one
    entry, or null, per condition."""

    reference_source: Annotated[str, Expected("text")] = ""
    """Where `reference` is from."""

    @property
    def healthy_index(self) -> int:
        """The condition that slowdowns are relative to."""
        names = [condition.name for condition in self.conditions]
        return names.index(HEALTHY) if HEALTHY in names else 0

    @property
    def has_whole_runs(self) -> bool:
        """Whether each system under each condition is a run of its own, with its restarts."""
        return bool(self.restarting)

    @property
    def restarting(self) -> tuple[SystemName, ...]:
        """The systems that restart from their last checkpoint when a rank fails."""
        return tuple(system for system in self.systems if system in _RESTARTING)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of one system, measured or not."""
        rounds = self.repeats * len(self.conditions) * (self.warmup_steps + self.steps)
        return self.profiling_steps + rounds


def compare_problems(compare: Compare, num_stages: int) -> Iterator[Problem]:
    """Yields the contradictions within the section, and with the pipeline."""
    names = Counter(condition.name for condition in compare.conditions)
    for name in (name for name, count in names.items() if count > 1):
        yield Problem("compare.conditions", f"got {name!r} twice, expected different names")
    if len(set(compare.systems)) < len(compare.systems):
        yield mismatch("compare.systems", list(compare.systems), "each system once")
    others = [system for system in compare.systems if system not in _WHOLE_RUN_SYSTEMS]
    if compare.has_whole_runs and others:
        expected = f"only {', '.join(_WHOLE_RUN_SYSTEMS)} beside a system that restarts"
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
    """Refuses spans of steps and cuts: a condition lasts a whole round, and a cut never ends it."""
    for name in ("cut", "from_step", "to_step"):
        value = getattr(link, name)
        if value != EmulatedLink.model_fields[name].default:
            expected = f"no {name}: a condition lasts a whole round, over links that deliver"
            yield mismatch(f"{key}.{name}", value, expected)
