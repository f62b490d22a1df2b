"""``jaxmorph replay``: prints a run's decisions as they are made again, and where they differ."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from jaxmorph.config import load_config
from jaxmorph.control.events import ControlEvent
from jaxmorph.errors import UserError
from jaxmorph.report.run_directory import CONFIG
from jaxmorph.training.replay import Moment, replay

_DECISIONS = ("plan_changed", "plan_kept")
_SECTION = "adaptation."


def print_replay(run_dir: Path, overrides: Sequence[str], console: Console) -> int:
    """Replay a run, and print a line for each event.

    Args:
        overrides: Of the section `adaptation`; without any the decisions should be those of the
            run.

    Returns:
        The exit code: 1 where the run's own settings decide otherwise than they did.

    Raises:
        UserError: If nothing was kept of the run, or an override is of another section.
    """
    for override in overrides:
        if not override.startswith(_SECTION):
            raise UserError(f"replay: got {override}, expected {_SECTION}KEY=VALUE")
    if not (run_dir / CONFIG).is_file():
        raise UserError(f"{run_dir}: got no {CONFIG}, expected a run's directory")
    config = load_config(run_dir / CONFIG, overrides)
    moments, difference, num_decisions, num_simulated = 0, None, 0, 0
    for moment in replay(run_dir, config.adaptation if overrides else None):
        moments += 1
        if moment.differs and difference is None:
            difference = moment
            _print_difference(moment, console)
        num_simulated += moment.is_simulated
        for event in moment.events:
            num_decisions += event.kind in _DECISIONS
            _print_event(moment, event, console)
    observed = f"{moments - num_simulated:,} observations, {num_decisions} decisions"
    if difference is None:
        console.print(f"{observed}: the same as in the run")
        return 0
    if overrides:
        console.print(f"{observed}; from step {difference.step} on simulated")
        return 0
    console.print(f"{observed}: they differ from step {difference.step} on")
    return 1


def _print_event(moment: Moment, event: ControlEvent, console: Console) -> None:
    mark = "~" if moment.is_simulated else " "
    line = Text.assemble(
        f"{moment.step:6d} {mark} ",
        (f"{event.kind:22}", "bold"),
        f"{event.link or '':6}",
        event.detail,
    )
    console.print(line, soft_wrap=True)


def _print_difference(moment: Moment, console: Console) -> None:
    then, now = moment.differences()
    console.print(Text(f"{moment.step:6d}   in the run: {then}"), soft_wrap=True)
    console.print(Text(f"{moment.step:6d}   now:        {now}"), soft_wrap=True)
