"""How a stage's payloads get into slots and out of them: found out once, when the rank starts."""

from dataclasses import dataclass
from functools import partial

from jax.sharding import Sharding

from jaxmorph.copies.at_once import AtOnceTier
from jaxmorph.copies.choosing import AUTO, first_that_works, named_one
from jaxmorph.copies.cuda_driver import CudaDriver
from jaxmorph.copies.programs import CopyTier, LandingTier
from jaxmorph.copies.trial import try_landing, try_tier
from jaxmorph.copies.ways import (
    WITHOUT_DRIVER,
    OpenDriver,
    TellOfMemory,
    WaysToCopy,
    ways_to_copy,
)


@dataclass(frozen=True)
class StageCopies:
    """How a stage copies.

    Attributes:
        ways: What they were chosen from.
    """

    outgoing: CopyTier
    incoming: LandingTier
    ways: WaysToCopy

    def close(self) -> None:
        """End what copies have begun, once they are over; the driver forgets the slots."""
        self.ways.close()


def open_copies(
    placement: Sharding,
    tell_of_memory: TellOfMemory,
    wanted: str = AUTO,
    open_driver: OpenDriver = CudaDriver.open,
) -> StageCopies:
    """The ways of copying that a stage takes: each is tried, and the first that works is it.

    Of each that comes before and doesn't work, a warning says why.

    Args:
        placement: Where the stage keeps its arrays.
        tell_of_memory: Has a keeper told of the memory of all slots (`DataPlane.tell_of_memory`).
        wanted: A tier's name, or "auto".
        open_driver: Opens the driver of a GPU, given its number.

    Raises:
        UserError: If the tier that is wanted doesn't work here; it names those that do.
        RuntimeError: If none works.
    """
    with_driver = wanted not in WITHOUT_DRIVER
    ways = ways_to_copy(placement, tell_of_memory, with_driver=with_driver, open_driver=open_driver)
    try:
        into = partial(try_tier, placement=placement, keeper=ways.memory)
        if wanted == AUTO:
            outgoing = first_that_works(ways.outgoing, into, "into")
        else:
            outgoing = named_one(ways.outgoing, into, wanted)
        return StageCopies(AtOnceTier(outgoing), _incoming(ways, placement, wanted), ways)
    except BaseException:
        ways.close()
        raise


def _incoming(ways: WaysToCopy, placement: Sharding, wanted: str) -> LandingTier:
    """The first that works; who names a way that copies out of slots too has that tried first."""
    if len(ways.incoming) == 1:
        return ways.incoming[0]
    tiers = sorted(ways.incoming, key=lambda tier: tier.name != wanted)
    out_of = partial(try_landing, placement=placement, keeper=ways.memory)
    return first_that_works(tiers, out_of, "out of")
