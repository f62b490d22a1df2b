"""The check from its command line to its exit code."""

import argparse
import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from jaxmorph.errors import UserError
from jaxmorph.gpu_check.attention import measure_attention
from jaxmorph.gpu_check.both_ways import measure_both_ways
from jaxmorph.gpu_check.copy_parts import measure_incoming, measure_outgoing
from jaxmorph.gpu_check.device import find_device, look_at_device
from jaxmorph.gpu_check.head_of_line import measure_head_of_line
from jaxmorph.gpu_check.instruction_cost import measure_instructions
from jaxmorph.gpu_check.kernel_choices import sharing_kernel_choices
from jaxmorph.gpu_check.parity import measure_parity
from jaxmorph.gpu_check.registration import measure_registration
from jaxmorph.gpu_check.report import Outcome, Report, write_json
from jaxmorph.gpu_check.settings import CheckSettings, settings_for
from jaxmorph.gpu_check.stage_speed import measure_speed
from jaxmorph.gpu_check.stash_memory import measure_memory
from jaxmorph.gpu_check.two_stages import measure_two_stages
from jaxmorph.gpu_check.waits import measure_waits

Part = Callable[[CheckSettings], Report]

PARTS: Mapping[str, Part] = {
    "device": look_at_device,
    "parity": measure_parity,
    "stage": measure_speed,
    "memory": measure_memory,
    "two-stages": measure_two_stages,
    "head-of-line": measure_head_of_line,
    "registration": measure_registration,
    "outgoing": measure_outgoing,
    "incoming": measure_incoming,
    "attention": measure_attention,
    "both-ways": measure_both_ways,
    "waits": measure_waits,
    "instructions": measure_instructions,
}
"""The parts by name, in the order in which they run: where time is short, the last are left out.
What may hang comes behind what tells most. None needs another."""


LIMIT_S = 440.0
"""All of it is to take less than eight minutes, whatever hangs."""

HANGS_S = 35.0
"""So much later the process ends itself, and says where it was."""

_STDERR = 2

LEAST_S = 30.0
"""With less left there is no use in beginning a part."""


def main(arguments: Sequence[str] | None = None, parts: Mapping[str, Part] = PARTS) -> int:
    """Run the check.

    Args:
        arguments: Words after the command's name; those of this process when None.
        parts: What there is to run.

    Returns:
        0 when every part ran and all that they ask for holds, 1 when not, 2 without a GPU.
    """
    chosen = _parse(arguments, parts)
    try:
        device = find_device(allow_cpu=chosen.allow_cpu)
        settings = settings_for(device)
        named = {name: parts[name] for name in chosen.parts}
        with _ending_in_time(chosen.limit_s + HANGS_S), sharing_kernel_choices(device):
            outcomes = run_parts(named, settings, chosen.json, chosen.limit_s)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    failed = [outcome.part for outcome in outcomes if not outcome.holds]
    _say(f"FAILED: {', '.join(failed)}" if failed else "all parts ran, and what they ask for holds")
    return int(bool(failed))


@contextmanager
def _ending_in_time(limit_s: float) -> Iterator[None]:
    """End the process where it hangs, on a device perhaps, which no exception gets it out of."""
    faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def run_parts(
    parts: Mapping[str, Part],
    settings: CheckSettings,
    json_path: Path | None,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Run the parts, and tell what each finds at once: the next one may end the process.

    Args:
        parts: By name, in their order.
        json_path: Where to write what was found, after every part.
        limit_s: When no part is begun any more, and those that wait for processes give up.
        clock: Seconds.
    """
    outcomes: list[Outcome] = []
    until_s = clock() + limit_s
    for name, part in parts.items():
        if json_path:
            write_json(json_path, outcomes, running=name)
        left_s = until_s - clock()
        if left_s < LEAST_S:
            late = f"not begun: the check's {limit_s:g} s are over; run it with --parts {name}"
            outcomes.append(Outcome(name, 0.0, error=late))
        else:
            outcomes.append(run_part(name, part, replace(settings, left_s=left_s)))
        _say(f"{outcomes[-1]}\n")
    if json_path:
        write_json(json_path, outcomes, running=None)
    return outcomes


def run_part(name: str, part: Part, settings: CheckSettings) -> Outcome:
    """Run one part; whatever goes wrong in it is its own.

    Raises:
        UserError: If the check can't be run at all like this.
    """
    began_s = time.perf_counter()
    try:
        outcome = Outcome(name, report=part(settings), seconds=time.perf_counter() - began_s)
        json.dumps(outcome.to_json())  # what can't be told is the part's fault, too
        return outcome
    except UserError:
        raise
    except Exception as error:
        seconds, reason = time.perf_counter() - began_s, " ".join(str(error).split())[:300]
        told = f"{type(error).__name__}: {reason}"
        return Outcome(name, seconds, error=told, traceback=traceback.format_exc())


def _parse(arguments: Sequence[str] | None, parts: Mapping[str, Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jaxmorph.gpu_check",
        description="Checks that jaxmorph computes rightly on this GPU, and how fast.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what is found here")
    parser.add_argument("--parts", default=",".join(parts), help="some of %(default)s")
    parser.add_argument(
        "--allow-cpu", action="store_true", help="without a GPU, run small sizes on the CPU"
    )
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, metavar="S",
        help="when no part is begun any more (%(default)g)",
    )  # fmt: skip
    chosen = parser.parse_args(arguments)
    chosen.parts = chosen.parts.split(",")
    if unknown := [name for name in chosen.parts if name not in parts]:
        parser.error(f"--parts: got {', '.join(unknown)}, expected some of {', '.join(parts)}")
    return chosen


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
