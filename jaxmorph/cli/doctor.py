"""``jaxmorph doctor``: what this machine can do, in a table that says enough in a bug report."""

import json
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:  # the command line starts without what facts need
    from jaxmorph.cli.doctor_host import Fact, Section

_WORKS = {None: "", True: "ok", False: "no"}
_SAYS_NO_MORE = ("yes", "no", "none")
_NAME_WIDTH = 32


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Find out what this machine can do, and why not what it can't."""
    sections = look_at_machine()
    if as_json:
        told = {section.about: section.to_json() for section in sections}
        typer.echo(json.dumps(told, indent=1))
        return 0
    print_sections(sections, Console(highlight=False, markup=False))
    return 0


def look_at_machine() -> Iterator["Section"]:
    """All that there is to know, by what it is about."""
    from jaxmorph.cli.doctor_host import (
        cluster_facts,
        find_out,
        host_facts,
        network_facts,
        privilege_facts,
        software_facts,
    )

    return find_out(
        {
            "software": software_facts,
            "host": host_facts,
            "privileges": privilege_facts,
            "network": network_facts,
            "cluster and environment": cluster_facts,
            "devices": _device_facts,
            "copies": _copy_facts,
        }
    )


def print_sections(sections: Iterable["Section"], console: Console) -> None:
    """Print a table, each part of it as soon as it is found out."""
    for section in sections:
        console.print(section.about, style="bold", soft_wrap=True)
        for fact in section.facts:
            console.print(_line(fact), soft_wrap=True)


def _line(fact: "Fact") -> str:
    """A fact in columns; what is long comes last, where nothing is cut or broken."""
    says_no_more = fact.works is not None and fact.note and fact.found in _SAYS_NO_MORE
    told = ": ".join(text for text in ("" if says_no_more else fact.found, fact.note) if text)
    return f"  {fact.name:{_NAME_WIDTH}}  {_WORKS[fact.works]:2}  {told}".rstrip()


def _device_facts() -> Iterator["Fact"]:
    # A GPU that a run computes on is to be looked at, not to be taken.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jaxmorph.cli.doctor_accelerators import attention_fact, device_facts
    from jaxmorph.cli.doctor_host import nvidia_facts

    yield from nvidia_facts()
    yield from device_facts()
    yield attention_fact()


def _copy_facts() -> Iterator["Fact"]:
    from jaxmorph.cli.doctor_accelerators import copy_facts

    yield from copy_facts()
