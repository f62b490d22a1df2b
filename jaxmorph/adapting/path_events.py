"""What rank 0 says of direct paths that fail and come back: events, without their time and step."""

from collections.abc import Iterable
from typing import Any

from jaxmorph.control.path_failure import PathFailure
from jaxmorph.schedule.costs import Link

Happening = dict[str, Any]
"""An event's `kind`, `link`, `detail` and `evidence`."""

PATH_DOWN = "link_path_down"


def of_failure(failure: PathFailure) -> Happening:
    """That a link is delegated from the middle of a step on."""
    resent = f"{failure.resent} message{'' if failure.resent == 1 else 's'} sent again"
    return {
        "kind": "link_failed",
        "link": str(failure.link),
        "detail": f"{failure.detail}; delegated from there on, {resent}",
        "evidence": failure.to_json(),
    }


def of_restored(links: Iterable[Link]) -> list[Happening]:
    """That links were on their direct paths again in a step.

    Args:
        links: Which, in their order.
    """
    return [
        {"kind": "link_restored", "link": str(link), "detail": "on its direct path again"}
        for link in links
    ]


def of_path_down(link: Link) -> Happening:
    """That a failed path that had been up for long enough is down before it was used."""
    detail = "the direct path, which had come back, is down again; the link stays delegated"
    return {"kind": PATH_DOWN, "link": str(link), "detail": detail}


def of_no_life_left(link: Link) -> Happening:
    """That a link stays delegated for good."""
    detail = (
        "the direct path has failed as often as it can begin while these processes live: the link "
        "stays delegated until the run is started again"
    )
    return {"kind": "link_given_up", "link": str(link), "detail": detail}
