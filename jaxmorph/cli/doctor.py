"""``jaxmorph doctor``: a table of what works on this machine, complete enough for a bug report."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:  # the command line starts without importing transport
    from jaxmorph.cli.doctor_host import Fact

_WORKS = {None: "", True: "ok", False: "no"}
_SAYS_NO_MORE = ("yes", "no", "none")
_NAME_WIDTH = 32


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Check what works on this machine, and why the rest doesn't."""
    from jaxmorph.cli import doctor_host as host

    sections = host.run_checks(
        {
            "software": host.software_facts,
            "host": host.host_facts,
            "network": host.network_facts,
            "cluster and environment": host.cluster_facts,
            "devices": _device_facts,
            "settings for GPUs": _setting_facts,
            "copies": _copy_facts,
        }
    )
    if as_json:
        by_section = {about: [asdict(fact) for fact in facts] for about, facts in sections}
        typer.echo(json.dumps(by_section, indent=1))
        return 0
    console = Console(highlight=False, markup=False)
    for about, facts in sections:  # each is printed as soon as it is known
        console.print(about, style="bold", soft_wrap=True)
        for fact in facts:
            console.print(_line(fact), soft_wrap=True)
    return 0


def _line(fact: "Fact") -> str:
    """A fact in columns; the long text comes last, so that no line is cut."""
    is_repetition = fact.works is not None and fact.note and fact.found in _SAYS_NO_MORE
    text = ": ".join(part for part in ("" if is_repetition else fact.found, fact.note) if part)
    return f"  {fact.name:{_NAME_WIDTH}}  {_WORKS[fact.works]:2}  {text}".rstrip()


def _device_facts() -> Iterator["Fact"]:
    # Otherwise JAX takes most of a GPU's memory, which a run may be using.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from jaxmorph.cli.doctor_accelerators import attention_fact, device_facts
    from jaxmorph.cli.doctor_host import nvidia_facts

    yield from nvidia_facts()
    yield from device_facts()
    yield attention_fact()


def _setting_facts() -> Iterator["Fact"]:
    from jaxmorph.cli.doctor_accelerators import setting_facts

    yield from setting_facts()


def _copy_facts() -> Iterator["Fact"]:
    from jaxmorph.cli.doctor_accelerators import copy_facts

    yield from copy_facts()
