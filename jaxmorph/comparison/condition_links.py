"""How links behave in one round of a condition."""

from dataclasses import dataclass

from jaxmorph.comparison.declared_links import link_conditions
from jaxmorph.config.compare_section import Condition
from jaxmorph.emulation.link_settings import begun_at, trace_conditions
from jaxmorph.transport.link_emulator import LinkCondition


@dataclass(frozen=True)
class RoundLinks:
    """How links behave in a round.

    Attributes:
        steady: Throughout; a system that adapts is told of it.
        traced: From time to time, or step to step; it is told of what is over.
    """

    steady: tuple[LinkCondition, ...]
    traced: tuple[LinkCondition, ...]

    @property
    def all(self) -> tuple[LinkCondition, ...]:
        """Both, as those who emulate links are told."""
        return (*self.steady, *self.traced)


def round_links(
    condition: Condition, num_stages: int, key: str, number: int = 0, first_step: int = 0
) -> RoundLinks:
    """How links behave in one round of a condition.

    Args:
        key: Where the condition stands in the configuration, for errors.
        number: Of the round, from 0: each has its own draw of a regime.
        first_step: The number of its first step.

    Raises:
        UserError: If its trace can't be read, or names a link that the pipeline doesn't have.
    """
    traced = trace_conditions(condition.trace, num_stages, f"{key}.trace", number)
    return RoundLinks(link_conditions(condition), begun_at(traced, first_step))
