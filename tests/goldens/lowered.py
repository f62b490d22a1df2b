"""Lowers schedules, or traces stages, with the tree on PYTHONPATH: JSON in, JSON out.

The only part that imports the tree. Run as a script, so that no other is on the path, with
"programs" or "stages". What it needs is found by name, wherever in jaxmorph a refactoring has put
it; what has another name since, or other arguments, is mended here.
"""

import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any


@cache
def find(name: str, *packages: str) -> Any:
    """The function or class of a name, defined in one of these packages of jaxmorph."""
    root = Path(importlib.import_module("jaxmorph").__path__[0])
    for package in packages:
        for path in sorted([*root.glob(f"{package}.py"), *root.glob(f"{package}/**/*.py")]):
            if re.search(rf"^(?:def|class) {name}\b", path.read_text(), re.MULTILINE):
                module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
                return getattr(importlib.import_module(module), name)
    raise SystemExit(f"no {name} in jaxmorph/{packages}: has it another name? see {__file__}")


def programs(case: dict[str, Any]) -> list[str]:
    """Every rank's program, as text, of one step."""
    link, costs_of = find("Link", "records", "schedule"), find("StageCosts", "schedule")
    rows = [" ".join(order) for order in case["orders"]]
    schedule = find("Schedule", "schedule").from_rows(case["name"], rows)
    planned = find("simulate", "schedule")(schedule, costs_of.uniform(len(rows), 10, 12, 8), {})
    routes = {link.parse(name): route for name, route in case["routes"].items()}
    lowered = find("lower", "program")(schedule, planned, routes, num_tied=case["tied"])
    if case["memory"]:
        offload, memory = find("offload", "program"), find("StageMemory", "schedule")
        lowered = [offload(program, memory(*case["memory"])) for program in lowered]
    return [find("instructions_text", "program")(program) for program in lowered]


def stage(case: dict[str, Any]) -> dict[str, Any]:
    """What the programs of one stage take, compute and return, by the kind of op."""
    model = importlib.import_module(f"jaxmorph.{case['factory']}").build(**case["model"])
    traced = find("trace_stage", "stage")(
        model,
        **case["place"],
        shapes=find("MicrobatchShapes", "stage").of_text(*case["shape"]),
    )
    program = find("_program", "stage")
    kinds = {kind: _counted(program(kind, traced)) for kind in ("F", "B", "W", "BW")}
    return {"name": case["name"], **kinds}


def _counted(program: Any) -> dict[str, Any]:
    """How often a program has each equation, and arguments and results of each type.

    Types say what an equation costs, so its parameters are left out, as is the order.
    """
    import jax

    jaxpr = jax.make_jaxpr(program.function)(*program.arguments).jaxpr
    equations = Counter(_equations(jaxpr))
    return {
        "equations": equations.total(),
        "of each": equations,
        "takes": Counter(map(_type, jaxpr.invars)),
        "returns": Counter(map(_type, jaxpr.outvars)),
        "donates": list(program.donated),
    }


def _equations(jaxpr: Any, within: str = "") -> Iterator[str]:
    """Yields each equation's primitive and types, with the loops and calls around it."""
    for eqn in jaxpr.eqns:
        name, bodies = within + eqn.primitive.name, list(find("bodies_of", "stage")(eqn))
        if bodies:
            yield name
        elif eqn.primitive.name == "one_minus_square":
            # In tanh's derivative by newer JAX (0.11.2, 0.12), where 0.10.2 has three equations.
            x = _type(eqn.outvars[0])
            yield f"{within}sub {x.partition('[')[0]}[] {x} -> {x}"
            yield f"{within}mul {x} {x} -> {x}"
            yield f"{within}add_any {x} {x} -> {x}"
        else:
            yield " ".join([name, *map(_type, eqn.invars), "->", *map(_type, eqn.outvars)])
        for body in bodies:
            yield from _equations(body, f"{name}: ")


def _type(atom: Any) -> str:
    return atom.aval.str_short(short_dtypes=True)


if __name__ == "__main__":
    function = {"programs": programs, "stages": stage}[sys.argv[1]]
    json.dump([function(case) for case in json.load(sys.stdin)], sys.stdout)
