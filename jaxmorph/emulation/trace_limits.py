"""What a trace may hold to be emulated: links that the pipeline has, and not too many changes."""

from collections import Counter
from collections.abc import Iterable

from jaxmorph.config.link_problems import possible_links
from jaxmorph.errors import UserError
from jaxmorph.schedule.costs import Link

MOST_CHANGES = 60_000
"""How often a link may change: a rank's sidecar is told of all its links in one record.

Regime A changes a link 48,000 times in an hour.
"""


def require_links_of(num_stages: int, links: Iterable[Link], key: str) -> None:
    """Refuse links that a pipeline doesn't have.

    Args:
        key: Where the trace comes from, for the error.

    Raises:
        UserError: If there is such a link.
    """
    possible = possible_links(num_stages)
    unknown = set(links).difference(possible)
    if unknown:
        links_text = ", ".join(map(str, possible))
        expected = f"one of {links_text}" if possible else "no links, for one stage"
        raise UserError(f"{key}: got link {min(unknown)}, expected {expected}")


def require_few_changes(links: Iterable[Link], key: str) -> None:
    """Refuse more changes of a link than a rank's end of the data plane can be told.

    Args:
        links: The link of each change.
        key: Where the trace comes from, for the error.

    Raises:
        UserError: If a link changes more than `MOST_CHANGES` times.
    """
    for link, count in Counter(links).most_common(1):
        if count > MOST_CHANGES:
            got = f"got {count} changes of link {link}"
            raise UserError(f"{key}: {got}, expected at most {MOST_CHANGES}: a shorter trace")
