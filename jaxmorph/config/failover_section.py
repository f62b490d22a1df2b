"""The section of a configuration that says whether a step outlives the failure of a direct path."""

from typing import Annotated, Literal

from jaxmorph.config.sections import Expected, Section


class Failover(Section):
    """Whether transfers of a direct link whose path fails go on delegated, in the same step.

    It takes a data plane for every link, whatever its route, and a word between both ends before
    each direct transfer. `auto`: where the run adapts, which has the data plane anyway.
    """

    enabled: Annotated[Literal["auto"] | bool, Expected("auto, true or false")] = "auto"
