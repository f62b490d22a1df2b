"""Lowers schedules with the tree on PYTHONPATH: JSON in, JSON out. The only part that imports it.

Run as a script, so that no other tree is on the path. What it needs is found by name, wherever in
jaxmorph a refactoring has put it; what has another name since, or other arguments, is mended here.
"""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any


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


if __name__ == "__main__":
    json.dump([programs(case) for case in json.load(sys.stdin)], sys.stdout)
