"""The section of a configuration that says whether a run adapts to its links, and how readily."""

from typing import Annotated, Literal

from pydantic import Field

from jaxmorph.config.sections import Count, Expected, Section

SPLIT_SCHEDULES = ("adaptive", "initial", "paper", "zb-h1", "zb-h2")
"""Schedules that run a backward as B and W, which those that replace them do too."""


class Adaptation(Section):
    """Whether schedule and routes follow what links turn out to be, and when that is worth it.

    A new plan must shorten the predicted step by `worth` of it. With `delegates: slow` only links
    that have turned slow are ever taken off their routes, with `any` healthy ones too where a
    prediction finds that worth it, which doesn't count what delegation takes of host memory and
    processors. A delegated link that is healthy again stays so for at least `dwell_steps`, and for
    longer, up to `longest_dwell_steps`, if it keeps coming and going. One whose direct path failed
    goes back once both ends have found that path up for `failback_steps` in a row, and for twice as
    many after each further failure, up to `longest_dwell_steps`.

    `intra_step` can't be anything but `off`: ranks could once take another op in place of a late
    one, inside a step, and that gained nothing in real runs.
    """

    enabled: Annotated[bool, Expected("true or false")] = False
    intra_step: Annotated[
        Literal["off"],
        Expected(
            "'off': changing the order inside a step was removed because it gained nothing in real "
            "runs, see docs/adaptation.md"
        ),
    ] = "off"
    delegates: Literal["slow", "any"] = "slow"
    worth: Annotated[float, Field(ge=0, lt=1), Expected("a number from 0 to below 1")] = 0.02
    dwell_steps: Count = 4
    longest_dwell_steps: Count = 256
    failback_steps: Count = 20
