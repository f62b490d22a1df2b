"""The section of a comparison's step times: for each condition a bar for each system."""

from collections.abc import Iterator

from jaxmorph.reporting.page.elements import Html, element, joined, number
from jaxmorph.reporting.run_matrix import Matrix, Run

_LOOKS = 7


def bars_section(matrix: Matrix) -> Html:
    """Median steps as bars, all on one scale."""
    highest = max(map(_high, matrix.runs.values()), default=0.0) or 1.0
    keys = [("key spread", "p10 to p90")]
    if matrix.has_reference:
        keys.append(("key reference", matrix.reference_source or "reference"))
    legend = (
        element("li", element("span", class_=look, aria_hidden="true"), name) for look, name in keys
    )
    return element(
        "section",
        element("h2", "Step time"),
        element("p", "Median steps in milliseconds, all bars on one scale.", class_="note"),
        element("ul", *legend, class_="legend"),
        element(
            "div", *_rows(matrix, highest), class_="rows"
        ),  # one grid, so that tracks are alike
        id="steps",
    )


def _high(run: Run) -> float:
    return max(run.step_ms.p90 if run.step_ms else 0.0, run.reference_ms or 0.0)


def _rows(matrix: Matrix, highest: float) -> Iterator[Html]:
    """The rows of all conditions, for one grid: then all bars have the same room."""
    for condition in matrix.conditions:
        yield element("h3", condition)
        for index, system in enumerate(matrix.systems):
            yield from _row(system, index, matrix.runs.get((system, condition)), highest)


def _row(system: str, index: int, run: Run | None, highest: float) -> Iterator[Html]:
    yield element("div", system)
    parts = [] if run is None else list(_bar(run, highest))
    yield element("div", *parts, class_=f"track system-{index % _LOOKS}", aria_hidden="true")
    yield element("div", _says(run), class_="took wrong" if run and run.failed else "took")


def _bar(run: Run, highest: float) -> Iterator[Html]:
    def percent(ms: float) -> str:
        return f"{number(100.0 * ms / highest)}%"

    times = run.step_ms
    if times is not None:
        yield element("span", class_="value", style=f"width:{percent(times.median)}")
        width = percent(times.p90 - times.p10)
        style = f"left:{percent(times.p10)};width:{width}"
        yield element("span", class_="spread", style=style)
    if run.reference_ms is not None:
        yield element("span", class_="reference", style=f"left:{percent(run.reference_ms)}")


def _says(run: Run | None) -> Html:
    if run is None:
        return joined(["not run yet"])
    if run.step_ms is None or run.failed:
        return joined(["failed"])
    slowdown = f", {run.slowdown:.2f} x" if run.slowdown is not None else ""
    noisy = ", noisy" if run.noisy else ""
    return joined([f"{run.step_ms.median:,.0f} ms{slowdown}{noisy}"])
