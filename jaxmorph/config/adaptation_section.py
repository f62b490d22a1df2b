"""The section of a configuration that says whether a run adapts to its links while it trains."""

from typing import Annotated, Literal

from jaxmorph.config.sections import Expected, Section


class Adaptation(Section):
    """How a run follows its links.

    `intra_step` lets a rank with a delegated link take another op than the planned one, inside a
    step, when that is late. `auto` is `on` where the schedule is `adaptive`, and else `off`.
    """

    enabled: Annotated[bool, Expected("true or false")] = False
    intra_step: Literal["off", "on", "auto"] = "off"
