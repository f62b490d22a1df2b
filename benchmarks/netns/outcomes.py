"""The bench's figures and their bars, a row each."""

from dataclasses import dataclass, field
from typing import Any

from jaxmorph.compare.provenance import load_averages


@dataclass(frozen=True)
class Outcome:
    """One figure.

    Attributes:
        case: What was done.
        figure: What was measured.
        value: Its value; None where the case failed before there was one.
        bar: What is asked of the value, None: nothing.
        at_least: Whether the bar is the least, and not the most, that is good enough.
        details: What else was seen, for the file.
        load: Load average of the machine, over the last minute, when it was measured.
    """

    case: str
    figure: str
    value: float | None
    bar: float | None = None
    at_least: bool = False
    details: dict[str, Any] = field(default_factory=dict)
    load: float = field(default_factory=lambda: load_averages()[0])

    @property
    def passes(self) -> bool:
        """Whether the bar is kept."""
        if self.value is None:
            return False
        if self.bar is None:
            return True
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def row(self) -> str:
        """The outcome as a line of the table that `HEADING` heads."""
        value = "failed" if self.value is None else f"{self.value:.3g}"
        sign = ">=" if self.at_least else "<="
        bar = "" if self.bar is None else f"{sign} {self.bar:g}"
        verdict = "" if self.passes else "  MISSED"
        return f"{self.case:48}{self.figure:30}{value:>10}{bar:>10}{self.load:7.2f}{verdict}"


HEADING = f"{'case':48}{'figure':30}{'value':>10}{'asked':>10}{'load':>7}"
