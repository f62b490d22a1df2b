"""Answers a batch of planning problems, one JSON object a line."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from jaxmorph.errors import UserError
from jaxmorph.schedule.answer import SimulateStep, simulate_links, solve
from jaxmorph.schedule.problem import parse_problem


def answer_lines(
    lines: Iterable[bytes], simulate_step: SimulateStep = simulate_links
) -> Iterator[dict[str, Any]]:
    """Answers a batch of problems, one JSON object a line, in order.

    Args:
        lines: UTF-8 JSON, one problem a line; empty lines are passed over.
        simulate_step: How to simulate; the default does not know blocking links.

    Yields:
        Each problem's answer, or ``{"name", "error"}`` for a problem with a mistake in it.
    """
    for line in lines:
        if line.strip():
            yield _answer_line(line, simulate_step)


def _answer_line(line: bytes, simulate_step: SimulateStep) -> dict[str, Any]:
    data: object = None
    try:
        data = _decoded(line)
        return solve(parse_problem(data), simulate_step).to_json()
    except UserError as error:
        name = data.get("name") if isinstance(data, dict) else None
        return {"name": name if isinstance(name, str) else None, "error": str(error)}


def _decoded(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}") from error
