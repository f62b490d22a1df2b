"""How a plan keeps to the devices' memory where its schedule holds more than fits."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxmorph.schedule.memory import StageMemory


@dataclass(frozen=True)
class Offloading:
    """What decides which stashes are offloaded, and when (`program.offload`).

    Args:
        memory: What a microbatch holds on each stage, and what its device has room for.
        spare: Places on the device that are kept free for stashes on their way.
        ahead: How many ops before the one that reads it a stash begins to come back, at most.
        early: Whether, of as many stashes that do as well, those go that were made first.
    """

    memory: tuple[StageMemory, ...]
    spare: int = 0
    ahead: int = 1
    early: bool = False

    def to_json(self) -> dict[str, Any]:
        """The same as a JSON object."""
        return asdict(self) | {"memory": [list(stage) for stage in self.memory]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Offloading":
        """The one that ``to_json`` described."""
        memory = tuple(StageMemory(*stage) for stage in data["memory"])
        return cls(memory, data["spare"], data["ahead"], data["early"])
