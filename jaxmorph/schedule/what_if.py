"""Changes to a planning problem, given as text: a link's latency or a stage's speed."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

from jaxmorph.errors import UserError
from jaxmorph.records import Link
from jaxmorph.schedule.costs import LinkDelay, StageCosts
from jaxmorph.schedule.problem import Problem

_LINK = re.compile(r"link=(\d+)(?:-(\d+))?:(\S+)ms", re.ASCII)
_STAGE = re.compile(r"stage=(\d+):(\S+)x", re.ASCII)
_MOST = 1e12  # milliseconds, or a factor; far larger ones overflow when counted in picoseconds


@dataclass(frozen=True)
class LinkChange:
    """Gives a link another latency in both directions, and no jitter."""

    link: Link
    latency_ms: float

    def __str__(self) -> str:
        return f"link {self.link}: {self.latency_ms:g} ms"


@dataclass(frozen=True)
class StageChange:
    """Multiplies the durations of a stage's ops."""

    stage: int
    factor: float

    def __str__(self) -> str:
        return f"stage {self.stage}: {self.factor:g}x"


Change = LinkChange | StageChange


def parse_change(text: str) -> Change:
    """Reads a change such as ``link=2:0ms`` (link 2-3), ``link=0-3:0ms`` or ``stage=1:0.5x``.

    Raises:
        UserError: The text is no such change.
    """
    if match := _LINK.fullmatch(text):
        lower = int(match[1])
        upper = int(match[2]) if match[2] else lower + 1
        return LinkChange(Link(lower, upper), _amount(text, match[3]))
    if match := _STAGE.fullmatch(text):
        return StageChange(int(match[1]), _amount(text, match[2]))
    raise _not_a_change(text)


def apply_changes(problem: Problem, changes: Iterable[Change]) -> Problem:
    """The problem with the changes, both to the simulated and to the planned links.

    Raises:
        UserError: A link or a stage that the problem does not have.
    """
    for change in changes:
        if isinstance(change, LinkChange):
            problem = _with_link(problem, change)
        else:
            problem = _with_stage(problem, change)
    return problem


def _with_link(problem: Problem, change: LinkChange) -> Problem:
    if change.link not in problem.links:
        known = ", ".join(map(str, problem.links)) or "no links"
        raise UserError(f"what_if: got link {change.link}, expected one of {known}")
    jitter_ms = problem.jitter_ms
    if jitter_ms is not None and change.link.upper == change.link.lower + 1:
        at = change.link.lower
        jitter_ms = (*jitter_ms[:at], 0.0, *jitter_ms[at + 1 :])
    return replace(
        problem,
        links=_with_latency(problem.links, change),
        planned_links=_with_latency(problem.planned_links, change),
        jitter_ms=jitter_ms,
    )


def _with_latency(links: Mapping[Link, LinkDelay], change: LinkChange) -> dict[Link, LinkDelay]:
    delay = replace(
        links[change.link],
        forward_latency_ms=change.latency_ms,
        backward_latency_ms=change.latency_ms,
    )
    return {**links, change.link: delay}


def _with_stage(problem: Problem, change: StageChange) -> Problem:
    num_stages = problem.costs.num_stages
    if change.stage >= num_stages:
        raise UserError(f"what_if: got stage {change.stage}, expected one of 0 to {num_stages - 1}")
    columns = (getattr(problem.costs, field.name) for field in fields(StageCosts))
    scaled = (
        tuple(ms * change.factor if stage == change.stage else ms for stage, ms in enumerate(times))
        for times in columns
    )
    return replace(problem, costs=StageCosts(*scaled))


def _amount(text: str, number: str) -> float:
    try:
        amount = float(number)
    except ValueError:
        raise _not_a_change(text) from None
    if not 0 <= amount <= _MOST:
        raise _not_a_change(text)
    return amount


def _not_a_change(text: str) -> UserError:
    return UserError(
        f"what_if: got {text!r}, expected a change such as link=2:0ms, link=2-3:0ms or stage=1:0.5x"
    )
