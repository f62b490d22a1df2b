"""Draws measured steps of a comparison's systems under each other, on one time axis.

`python -m benchmarks.timelines runs/hol --condition "2-3 30 ms" --systems zb,adaptive-informed`
reads what `jaxmorph compare` has written. Of each system it is the step nearest to the median.
"""

import argparse
import json
from pathlib import Path

from jaxmorph.compare.comparison import TIMELINES
from jaxmorph.compare.condition_links import declared_states, link_conditions
from jaxmorph.config import load_config
from jaxmorph.records import Link
from jaxmorph.report.draw.save import save_timelines
from jaxmorph.schedule.bubbles import bubble_ms, step_shares
from jaxmorph.schedule.costs import LinkDelay
from jaxmorph.schedule.timeline import Timeline


def main() -> None:
    """Draw the picture, and print what the stages of each system waited for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the directory of a comparison")
    parser.add_argument("--condition", required=True, help="one of the comparison's")
    parser.add_argument("--systems", help="some of the comparison's; all if not given")
    parser.add_argument("--out", type=Path, help=".png, .svg or .json; RUN/timelines.png if not")
    arguments = parser.parse_args()
    measured = json.loads((arguments.run / TIMELINES).read_text(encoding="utf-8"))
    if arguments.condition not in measured:
        parser.error(f"--condition: got {arguments.condition!r}, expected one of {[*measured]}")
    of_systems = measured[arguments.condition]
    wanted = arguments.systems.split(",") if arguments.systems else [*of_systems]
    if missing := [system for system in wanted if system not in of_systems]:
        parser.error(f"--systems: got {missing}, expected some of {[*of_systems]}")
    timelines = {system: Timeline.from_json(of_systems[system]) for system in wanted}
    out = arguments.out or arguments.run / "timelines.png"
    save_timelines(out, timelines, slow_links(arguments.run, arguments.condition))
    for system, timeline in timelines.items():
        print(f"{system}: {describe(timeline)}")
    print(f"wrote {out}")


def slow_links(run: Path, condition: str) -> dict[Link, LinkDelay]:
    """The links that were slow under a condition, whose messages are drawn."""
    compare = load_config(run / "config.yaml").compare
    of_name = {} if compare is None else {each.name: each for each in compare.conditions}
    return declared_states(link_conditions(of_name[condition]), message_bytes=0)


def describe(timeline: Timeline) -> str:
    """Its length, idle time by cause, and how much of the step each stage is blocked."""
    idle = ", ".join(f"{cause} {ms:.1f}" for cause, ms in bubble_ms(timeline).items() if ms > 0.05)
    blocked = " ".join(f"{shares.blocking:.1%}" for shares in step_shares(timeline))
    return f"{timeline.makespan_ms:.1f} ms; idle ms: {idle}; blocked by stage: {blocked}"


if __name__ == "__main__":
    main()
