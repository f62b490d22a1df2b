"""What the launcher of this process has told it, for a trainer that the process makes later.

It stands alone, so that a process can note it before it imports JAX.
"""

from jaxmorph.runtime.rank_process import RankArguments

_told: list[RankArguments] = []


def note_launch(arguments: RankArguments) -> None:
    """Keep what the launcher said.

    Args:
        arguments: The rank's; a process has one launcher.
    """
    _told[:] = [arguments]


def launch_told() -> RankArguments | None:
    """What the launcher said; None where no launcher of jaxmorph's has started this process."""
    return _told[0] if _told else None
