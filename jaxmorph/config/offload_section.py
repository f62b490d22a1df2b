"""The section of a configuration that lets stashes go to host memory."""

from typing import Annotated

from pydantic import Field

from jaxmorph.config.sections import Expected, Section


class Offload(Section):
    """Whether a plan may hold more microbatches than fit on the devices, the rest in host memory.

    What a device may hold is `schedule.max_live` or `schedule.max_stash_bytes`; with neither, of
    what is free on it once the stage is there, a fraction of `device_memory_fraction`, which
    schedules that are planned keep to without offload too, as do plans that replace a fixed one. A
    device that doesn't tell has no limit.
    """

    enabled: Annotated[bool, Expected("true or false")] = False
    device_memory_fraction: Annotated[
        float, Field(gt=0, le=1), Expected("a number above 0, at most 1")
    ] = 0.8
