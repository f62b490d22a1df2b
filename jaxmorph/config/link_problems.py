"""Finds mistakes in what a configuration says about links."""

from collections.abc import Iterable, Iterator, Sequence

from jaxmorph.config.link_sections import EmulatedHosts, EmulatedLink, EmulatedPath, LinkTrace
from jaxmorph.config.problems import Problem, mismatch, unknown_key
from jaxmorph.placement import Placement
from jaxmorph.records import Link


def possible_links(num_stages: int) -> tuple[Link, ...]:
    """The links of neighbours, and the one of first and last for chunks and tied parameters."""
    return Placement(num_stages, num_chunks=2).links


def emulated_link_problems(
    key: str, links: Sequence[EmulatedLink], num_stages: int, num_replicas: int = 1
) -> Iterator[Problem]:
    """Yields emulated links that don't exist, and empty spans of steps, of the list at `key`."""
    for index, link in enumerate(links):
        at = f"{key}.{index}"
        if Link(*link.between) not in possible_links(num_stages):
            expected = (
                f"two neighbours of the {num_stages} stages, the lower one first, or the first "
                "and the last"
            )
            yield mismatch(f"{at}.between", list(link.between), expected)
        elif link.source is not None and link.source not in link.between:
            low, high = link.between
            yield mismatch(f"{at}.source", link.source, f"null, {low} or {high}")
        if link.replica is not None and link.replica >= num_replicas:
            known = " or ".join(map(str, range(num_replicas)))
            expected = f"null, or {known}, as parallelism.data is {num_replicas}"
            yield mismatch(f"{at}.replica", link.replica, expected)
        yield from _span_problems(at, link)


def emulated_host_problems(
    key: str, pairs: Sequence[EmulatedHosts], num_hosts: int
) -> Iterator[Problem]:
    """Yields pairs of hosts that don't exist, and empty spans of steps, of the list at `key`."""
    for index, pair in enumerate(pairs):
        low, high = pair.between
        if not low < high < num_hosts:
            expected = f"two of the {num_hosts} hosts, 0 to {num_hosts - 1}, the lower one first"
            yield mismatch(f"{key}.{index}.between", list(pair.between), expected)
        yield from _span_problems(f"{key}.{index}", pair)


def _span_problems(at: str, path: EmulatedPath) -> Iterator[Problem]:
    if path.to_step is not None and path.to_step <= (path.from_step or 0):
        expected = f"null, or a step after from_step, which is {path.from_step or 0}"
        yield mismatch(f"{at}.to_step", path.to_step, expected)


def link_trace_problems(key: str, trace: LinkTrace | None) -> Iterator[Problem]:
    """Yields a problem if the trace at `key` has neither a file nor a regime, or both."""
    if trace is None:
        return
    if trace.file is None and trace.regime is None:
        expected = "missing, expected the path of a CSV file, or a regime"
        yield Problem(f"{key}.file", expected, missing=True)
    if trace.file is not None and trace.regime is not None:
        expected = "null, as a file is given: one of the two"
        yield mismatch(f"{key}.regime", trace.regime, expected)


def unknown_links(
    key: str, names: Iterable[str], num_stages: int, others: Sequence[str] = ()
) -> Iterator[Problem]:
    """Yields names in the section `key` that are neither links nor among the others."""
    links = tuple(map(str, possible_links(num_stages)))
    for name in names:
        turned = "-".join(reversed(name.split("-")))
        if not links:
            yield Problem(f"{key}.{name}", "unknown key; a pipeline of one stage has no links")
        elif turned in links and turned != name:
            yield Problem(f"{key}.{name}", f"unknown key; did you mean '{turned}'?")
        elif name not in (*links, *others):
            yield unknown_key(f"{key}.{name}", (*others, *links))
