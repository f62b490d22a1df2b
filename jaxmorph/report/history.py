"""A run's steps in memory: a few numbers of each step, and the last records."""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from jaxmorph.records import Event, EventKind, Goodput, RunSummary, StepRecord
from jaxmorph.report.text import longer_than_planned

RECENT = 20
"""How many of the last records are kept."""

_KEPT = (
    "loss", "held_out_loss", "step_s", "tokens_per_s", "predicted_step_s", "bubble_rate",
    "planned_bubble_rate", "tflops_per_device", "mfu",
)  # fmt: skip


class RunHistory:
    """The steps so far, at less than a hundred bytes a step."""

    def __init__(self) -> None:
        self.recent: deque[StepRecord] = deque(maxlen=RECENT)
        self._morph_steps: list[int] = []
        self._skipped_steps: list[int] = []
        self._numbers = {name: array("d") for name in _KEPT}
        self._steps = {name: array("q") for name in _KEPT}  # the step of each number
        self._planned_s = array("d")  # of every step; 0 if it had no plan
        self._peak_device_bytes: tuple[int, ...] | None = None

    def add(self, record: StepRecord) -> None:
        """Add the next step."""
        self.recent.append(record)
        for name, numbers in self._numbers.items():
            if (number := getattr(record, name)) is not None:
                numbers.append(number)
                self._steps[name].append(record.step)
        self._planned_s.append(record.predicted_step_s or 0.0)
        if record.skipped:
            self._skipped_steps.append(record.step)
        if (peaks := record.peak_device_bytes) is not None:
            before = self._peak_device_bytes or peaks  # restarted ranks count from 0
            self._peak_device_bytes = tuple(map(max, before, peaks))

    def go_back(self, step: int) -> None:
        """Remove `step` and later steps, which will be done again."""
        while self.recent and self.recent[-1].step >= step:
            self.recent.pop()
        for name, steps in self._steps.items():
            kept = bisect_left(steps, step)
            del steps[kept:], self._numbers[name][kept:]
        del self._planned_s[len(self) :]
        self._morph_steps = [morph for morph in self._morph_steps if morph < step]
        self._skipped_steps = [skipped for skipped in self._skipped_steps if skipped < step]

    def add_event(self, event: Event) -> None:
        """Add an event; the summary counts morphs."""
        if event.kind == EventKind.PLAN_CHANGED:
            self._morph_steps.append(event.step)

    def __len__(self) -> int:
        return len(self.losses)

    @property
    def losses(self) -> Sequence[float]:
        """The loss of every step."""
        return self._numbers["loss"]

    @property
    def productive_s(self) -> float:
        """The time spent in steps."""
        return sum(self._numbers["step_s"])

    @property
    def held_out_losses(self) -> Sequence[float]:
        """The held-out losses, of the steps that were evaluated."""
        return self._numbers["held_out_loss"]

    def summary(
        self,
        *,
        elapsed_s: float,
        run_directory: Path,
        picture: Path | None = None,
        traces: Sequence[Path] = (),
        goodput: Goodput | None = None,
    ) -> RunSummary:
        """Summarize at least one step, with medians over the steps."""
        return RunSummary(
            losses=tuple(self.losses),
            held_out_losses=tuple(self.held_out_losses),
            elapsed_s=elapsed_s,
            step_s=median(self._numbers["step_s"]),
            predicted_step_s=self._median("predicted_step_s"),
            bubble_rate=self._median("bubble_rate"),
            planned_bubble_rate=self._median("planned_bubble_rate"),
            tokens_per_s=median(self._numbers["tokens_per_s"]),
            run_directory=run_directory,
            picture=picture,
            traces=tuple(traces),
            goodput=goodput,
            morph_steps=tuple(self._morph_steps),
            longer_than_planned=longer_than_planned(
                zip(self._numbers["step_s"], self._planned_s, strict=True)
            ),
            skipped_steps=len(self._skipped_steps),
            peak_device_bytes=self._peak_device_bytes,
            tflops_per_device=self._median("tflops_per_device"),
            mfu=self._median("mfu"),
        )

    def _median(self, name: str) -> float | None:
        numbers = self._numbers[name]
        return median(numbers) if numbers else None
