"""docs/links.md: what it says of the paper's figures is what their committed results say."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def slow_steps(figure: str) -> Iterator[dict[str, float]]:
    """What the page's table is made of, for each condition with slow links."""
    text = (DOCS / "results" / figure / "results.json").read_text(encoding="utf-8")
    runs = {(run["system"], run["condition"]): run for run in json.loads(text)["runs"]}
    step_ms = {key: run["step_ms"]["median"] for key, run in runs.items()}
    for condition in dict.fromkeys(name for _, name in runs if name != "healthy"):
        over = {
            system: step_ms[system, condition] / runs[system, condition]["predicted_ms"]
            for system in ("1f1b", "zb", "adaptive")
        }
        adaptive = step_ms["adaptive", condition]
        yield {
            "of zb-delegated": adaptive / step_ms["zb-delegated", condition],
            "of healthy": adaptive / step_ms["adaptive", "healthy"],
            "direct, least": min(over["1f1b"], over["zb"]),
            "direct, most": max(over["1f1b"], over["zb"]),
            "adaptive": over["adaptive"],
        }


def from_to(values: Iterable[float]) -> str:
    least, *_, most = sorted(values)
    return f"{least:.2f} to {most:.2f}"


def row(figure: str, *first: str) -> str:
    steps = list(slow_steps(figure))
    direct = [step[each] for step in steps for each in ("direct, least", "direct, most")]
    found = [[step[name] for step in steps] for name in ("of zb-delegated", "of healthy")]
    columns = [*found, direct, [step["adaptive"] for step in steps]]
    return f"| {' | '.join([*first, *map(from_to, columns)])} |"


def test_the_rows_on_slow_links_are_those_of_the_results():
    page = (DOCS / "links.md").read_text(encoding="utf-8").splitlines()
    one_link = "the first or the last, 30 and 60 ms"
    assert row("figure16", "7B", one_link) in page
    assert row("figure16_14b", "14B", one_link) in page
    assert row("figure17", "14B", "two or three at once, 30 ms") in page
