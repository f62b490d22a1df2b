"""``jaxmorph plan --mesh``: which rank is where, and what each pair of hosts carries."""

from collections.abc import Iterator
from itertools import combinations

from rich import box
from rich.console import Console
from rich.table import Table

from jaxmorph.control.remap import Traffic, traffic
from jaxmorph.errors import UserError
from jaxmorph.placement import Layout, Placement

EXPECTED = "replicas x tensor devices of a stage x devices of a host, such as 2x4x8"


def parse_mesh(text: str, num_stages: int) -> Layout:
    """The layout of the mesh that ``--mesh`` gives.

    Raises:
        UserError: The text is something else, or the mesh doesn't fit the hosts.
    """
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--mesh: got {text!r}, expected {EXPECTED}")
    replicas, tensor, devices = map(int, parts)
    per_host, left = divmod(devices, tensor)
    if left:
        raise UserError(
            f"--mesh: got {tensor} tensor devices and {devices} of a host, expected a number that "
            f"divides {devices}: the devices of a stage are in one host"
        )
    ranks = num_stages * replicas
    if ranks > per_host and ranks % per_host:
        raise UserError(
            f"--mesh: got {num_stages} stages x {replicas} replicas, {ranks} ranks, expected a "
            f"multiple of {per_host}, the ranks of a host"
        )
    return Layout.first(num_stages, replicas, per_host)


def print_mesh(layout: Layout) -> None:
    """Print the hosts with their ranks, and the pairs of hosts that send each other something."""
    console = Console(highlight=False, markup=False)
    console.print(_table(("host", "ranks"), _hosts(layout)))
    console.print(_table(("hosts", "links", "sums"), _pairs(layout)))


def _table(names: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    return table


def _hosts(layout: Layout) -> Iterator[tuple[str, str]]:
    positions = layout.positions
    for host in layout.hosts:
        yield str(host), ", ".join(f"{rank} ({positions[rank]})" for rank in layout.on(host))


def _pairs(layout: Layout) -> Iterator[tuple[str, str, str]]:
    links = Placement(len(layout.ranks[0])).links
    for low, high in combinations(layout.hosts, 2):
        found = traffic(layout, (low, high), links)
        if found != Traffic():
            sums = ", ".join(f"stage {stage}" for stage in found.stages)
            yield (
                f"{low}-{high}",
                ", ".join(link.in_replica(replica) for replica, link in found.links) or "-",
                sums or "-",
            )
