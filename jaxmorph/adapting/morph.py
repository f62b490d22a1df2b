"""A morph on its way from rank 0, which decides it, to all ranks, which swap to it together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxmorph.program.channels import Channel
from jaxmorph.program.instructions import Payload, RankProgram
from jaxmorph.program.program_text import parse_program
from jaxmorph.records import Message
from jaxmorph.schedule.costs import Link, Route
from jaxmorph.schedule.planner import Plan


@dataclass(frozen=True)
class Morph:
    """A change of plan, decided and made ready.

    Attributes:
        programs: Every rank's instructions, as `program_text` writes them: what a rank needs is
            made once, where time doesn't matter, and not by every rank between two steps.
        slots: How many slots each delegated channel needs.
        routes: The new routes of the links whose route changes.
        evidence: What the decision rests on, as JSON has it.
    """

    plan: Plan
    programs: tuple[str, ...]
    slots: Mapping[Channel, int]
    reason: str
    routes: Mapping[Link, Route]
    evidence: Message

    def to_json(self) -> Message:
        """What the ranks are told of it."""
        return {
            "programs": self.programs,
            "slots": [[*channel, number] for channel, number in self.slots.items()],
        }


@dataclass(frozen=True)
class OwnPart:
    """What a rank needs of a morph.

    Attributes:
        slots: How many slots each delegated channel needs.
    """

    program: RankProgram
    slots: Mapping[Channel, int]

    @classmethod
    def from_json(cls, told: Message, rank: int) -> "OwnPart":
        """A rank's part of what `Morph.to_json` told."""
        return cls(parse_program(told["programs"][rank]), slots_from_json(told["slots"]))


def slots_from_json(told: list[list[Any]]) -> dict[Channel, int]:
    """Slots by channel, from lists of a channel's fields and its number."""
    return {
        Channel(Payload(payload), source, destination, index): number
        for payload, source, destination, index, number in told
    }
