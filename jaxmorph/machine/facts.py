"""What is found out about a machine: facts, by what they are about."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxmorph.errors import UserError


@dataclass(frozen=True)
class Fact:
    """One thing about a machine.

    Attributes:
        found: What it is, with its unit.
        works: Whether it can be used; None where that isn't the question.
        note: Why not, or what it is for.
    """

    name: str
    found: str
    works: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Section:
    """Facts about one thing.

    Attributes:
        facts: In the order in which they are told.
    """

    about: str
    facts: tuple[Fact, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """The facts in JSON's types."""
        return [asdict(fact) for fact in self.facts]


def find_out(looks: Mapping[str, Callable[[], Iterable[Fact]]]) -> Iterator[Section]:
    """Look at everything; what can't be looked at is a fact too, and keeps nothing else back.

    Args:
        looks: For each thing what finds its facts.

    Yields:
        What has been found, as soon as it has: a device may keep who looks at it for ever.
    """
    for about, look in looks.items():
        yield Section(about, tuple(_looked(look)))


def _looked(look: Callable[[], Iterable[Fact]]) -> Iterable[Fact]:
    facts = []
    try:
        facts.extend(look())
    except Exception as error:  # the rest is told all the same
        own = isinstance(error, UserError)  # which says all
        reason = " ".join(str(error).split() if own else f"{type(error).__name__}: {error}".split())
        facts.append(Fact("this could not be looked at", "", False, reason))
    return facts
