"""Makes the pictures in docs/ and prints the numbers beside them: `python -m benchmarks.figures`.

Nothing is measured: plans and simulations come out the same on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmorph.control.profiler import Profile
from jaxmorph.control.step_programs import lower_step
from jaxmorph.program.blocking import simulate_blocking
from jaxmorph.records import Link
from jaxmorph.report.draw.save import save_timelines
from jaxmorph.schedule.bubbles import bubble_ms
from jaxmorph.schedule.costs import NO_LATENCY, Limits, LinkDelay, Links, StageCosts, chain_links
from jaxmorph.schedule.fixed import FIXED_SCHEDULES, interleaved
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.schedule import Schedule
from jaxmorph.schedule.simulate import simulate
from jaxmorph.schedule.timeline import Timeline
from tests.oracles.theory import (
    evenly_slack_schedule,
    expected_delay_ms,
    over_one_slow_link,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
OP_MS = 10.0
STAGES, SLOW_LINK, MICROBATCHES = 4, 1, 30  # of Figure 8, which names no number of stages
SLACKNESSES = (1, 2, 3, 4, 5)
LATENCIES_MS = tuple(map(float, range(61)))
_COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#CC79A7")
_MARKERS = "osD^vX"


def main() -> None:
    """Makes all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FIGURES))
    parser.add_argument("--out", type=Path, default=PICTURES, help="the folder to write to")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or FIGURES:
        FIGURES[name](arguments.out)


def example(folder: Path) -> None:
    """The picture at the top of the README: one slow link, and a plan that knows it."""
    links = chain_links((0.0, 0.0, 20.0))
    _save(folder / "plan.png", {"adaptive": _planned(4, 12, links, links)}, links)


def figure_4(folder: Path) -> None:
    """The paper's healthy pipeline."""
    timeline = _planned(4, 12, NO_LATENCY, NO_LATENCY, "paper")
    _save(folder / "figure4.png", {"paper": timeline}, NO_LATENCY)


def figure_5(folder: Path) -> None:
    """The paper's delayed pipeline, in the healthy order and planned again."""
    for latency_ms in (10.0, 20.0):
        links = chain_links((latency_ms, 0.0, 0.0))
        timelines = {
            "paper, planned for healthy links": _planned(4, 12, NO_LATENCY, links, "paper"),
            "adaptive, planned for the slow link": _planned(4, 12, links, links),
        }
        _save(folder / f"figure5_{latency_ms:g}ms.png", timelines, links)


def comparison(folder: Path) -> None:
    """Three schedules over the same slow link."""
    links = chain_links((0.0, 0.0, 30.0, 0.0, 0.0, 0.0, 0.0))
    timelines = {
        name: _simulated(FIXED_SCHEDULES[name](8, 32), links) for name in ("1f1b", "zb-h2")
    }
    timelines["adaptive"] = _planned(8, 32, links, links)
    _save(folder / "compare.png", timelines, links)


def head_of_line_blocking(folder: Path) -> None:
    """One order over one slow link, on the two kinds of route."""
    links = chain_links((0.0, 0.0, 20.0))
    costs = StageCosts.uniform(4, OP_MS, OP_MS, OP_MS)
    schedule = FIXED_SCHEDULES["zb-h2"](4, 12)
    programs = lower_step(schedule, Profile(costs, links))
    timelines = {
        "zb-h2, delegated": _simulated(schedule, links),
        "zb-h2, direct": simulate_blocking(programs, costs, links),
    }
    _save(folder / "blocking.png", timelines, links)


def virtual_stages(folder: Path) -> None:
    """Two virtual stages a rank, with a slow link around."""
    links = {Link(0, 3): LinkDelay(8.0, 8.0)}
    _save(
        folder / "interleaved.png", {"interleaved": _simulated(interleaved(4, 8, 2), links)}, links
    )


def figure_8(folder: Path) -> None:
    """Delay and bubble rate against latency for several slacknesses: the paper's Figure 8."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.9), layout="constrained")
    delays, rates = figure.subplots(1, 2)
    for slackness, colour in zip(SLACKNESSES, _COLOURS, strict=False):
        schedule = evenly_slack_schedule(STAGES, MICROBATCHES, slackness)
        steps = [over_one_slow_link(schedule, OP_MS, SLOW_LINK, c) for c in LATENCIES_MS]
        delay_ms = [step.makespan_ms - steps[0].makespan_ms for step in steps]
        formula = [
            expected_delay_ms(schedule, slackness, OP_MS, SLOW_LINK, c) for c in LATENCIES_MS
        ]
        look = {"color": colour, "label": f"slackness {slackness}"}
        delays.plot(LATENCIES_MS, formula, color=colour, linewidth=1.2)
        delays.plot(LATENCIES_MS[::3], delay_ms[::3], ".", markersize=6, **look)
        rates.plot(LATENCIES_MS, [100 * step.bubble_rate for step in steps], **look)
        print(f"figure 8, {look['label']}: delay at 0, 10, ... 60 ms: {delay_ms[::10]}")
    _label(delays, "the step's delay (ms)", "Dots: simulated. Lines: Theorem 1, exact")
    _label(rates, "bubble rate (%)", f"{STAGES} stages, {MICROBATCHES} microbatches, ops of 10 ms")
    figure.savefig(folder / "figure8.png", dpi=150)


def theorem_1(folder: Path) -> None:
    """The step's growth for each ms of latency against the slackness, and both constants."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for count, colour, marker in zip((30, 60, 240), _COLOURS[1:], _MARKERS, strict=False):
        slacknesses = [s for s in range(1, 11) if (STAGES - 1) * s < count]
        grown = [_growth(count, slackness) / count for slackness in slacknesses]
        axes.plot(slacknesses, grown, marker, color=colour, markersize=5.5, label=f"N = {count}")
        print(f"theorem 1, N = {count}: growth {[round(count * g, 1) for g in grown]}")
    every = [1 + at / 20 for at in range(181)]
    axes.plot(every, [2 / (s + 1) for s in every], "k-", linewidth=1.1, label="2 / (Δ + 1)")
    beyond = [s for s in every if s > 1.9]
    printed = [2 / (s - 1) for s in beyond]
    axes.plot(beyond, printed, "k:", linewidth=1.1, label="as printed: 2 / (Δ - 1)")
    axes.set(xlabel="slackness Δ", ylabel="growth of the step (ms)", ylim=(0, 1.6))
    axes.set_title("Per microbatch, for each ms of latency each way", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(folder / "theorem1.png", dpi=150)


FIGURES: Mapping[str, Callable[[Path], None]] = {
    "plan": example,
    "figure4": figure_4,
    "figure5": figure_5,
    "compare": comparison,
    "blocking": head_of_line_blocking,
    "interleaved": virtual_stages,
    "figure8": figure_8,
    "theorem1": theorem_1,
}


def _growth(num_microbatches: int, slackness: int) -> float:
    """The simulated step's growth per ms of latency, well beyond what is absorbed."""
    schedule = evenly_slack_schedule(STAGES, num_microbatches, slackness)
    near, far = (
        over_one_slow_link(schedule, OP_MS, SLOW_LINK, c).makespan_ms for c in (500.0, 600.0)
    )
    return (far - near) / 100.0


def _label(axes: Axes, quantity: str, title: str) -> None:
    axes.set(xlabel=f"latency of link {SLOW_LINK}-{SLOW_LINK + 1} (ms)", ylabel=quantity)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(0, LATENCIES_MS[-1])
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _planned(
    stages: int, microbatches: int, believed: Links, links: Links, name: str = "adaptive"
) -> Timeline:
    """A plan for the links as planned for, simulated over the real ones."""
    costs = StageCosts.uniform(stages, OP_MS, OP_MS, OP_MS)
    return _simulated(plan(costs, believed, Limits(), microbatches, name).schedule, links)


def _simulated(schedule: Schedule, links: Links) -> Timeline:
    costs = StageCosts.uniform(schedule.num_stages, OP_MS, OP_MS, OP_MS)
    return simulate(schedule, costs, links)


def _save(path: Path, timelines: Mapping[str, Timeline], links: Links) -> None:
    save_timelines(path, timelines, links)
    for name, timeline in timelines.items():
        idle = ", ".join(f"{cause} {ms:g}" for cause, ms in bubble_ms(timeline).items() if ms)
        print(f"{path.name}: {name}: {timeline.makespan_ms:g} ms; idle ms: {idle}")


if __name__ == "__main__":
    main()
