"""The check from its command line to its exit code: `python -m benchmarks.gpu --json FILE`.

With `--two-gpus` it checks what needs two.

Each part runs in a child process. This one never imports JAX, so nothing on the device can stop it.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.child import Outcome, Part, Row, run_part, serve

INTO = ("copy_engine", "pallas", "pinned_host", "io_callback")
OUT_OF = ("copy_engine", "pallas", "host")
"""Copy backends in the order in which runs on a GPU try them; a CPU has some of them."""

MODES = ("ends", "fails-over", "fails-over-tfrt")
"""What a failed collective does to a rank, by XLA's settings: see `two_gpus`."""

MOST_SLOWDOWN = 0.02
"""Of matmuls beside the messages of training, by the backend that runs take."""

ONE_GPU: Mapping[str, Part] = {
    "environment": Part("environment", "look_at_environment"),
    "stage": Part("stage", "measure_stage", limit_s=120.0),
    "two-stages": Part("two_stages", "compare_two_stages", limit_s=150.0),
    "registration": Part("environment", "measure_registration"),
    **{f"into:{name}": Part("copies", "check_backend", ("into", name)) for name in INTO},
    **{f"out-of:{name}": Part("copies", "check_backend", ("out-of", name)) for name in OUT_OF},
}
"""The parts by name, in their order: those that may hang come after the most informative ones."""

TWO_GPUS: Mapping[str, Part] = {
    "direct-link": Part("two_stages", "compare_two_stages", ("direct",), limit_s=150.0),
    "no-memory": Part("two_gpus", "check_no_memory"),
    **{f"stopped:{mode}": Part("two_gpus", "check_stopped_peer", (mode,)) for mode in MODES},
    "restart": Part("two_gpus", "check_restart", limit_s=200.0),
}
"""The parts that need two GPUs; two processes on a CPU rehearse them."""

PARTS = {**ONE_GPU, **TWO_GPUS}

LIMIT_S = 540.0
_CHILD = "--child"
_LEAST_S = 20.0  # with less left no part is begun


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check.

    Returns:
        0 when every part ran and every requirement holds, else 1; 2 if FILE can't be written.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == [_CHILD]:
        serve(PARTS[words[1]], words[2:])
    chosen = _parse(words)
    try:
        outcomes = run_parts(chosen.parts, chosen.limit_s, chosen.json, small=chosen.small)
    except OSError as error:
        sys.stderr.write(f"error: --json: {chosen.json}: {error.strerror}\n")
        return 2
    failed = [name for name, outcome in outcomes.items() if not outcome.holds]
    _say(f"FAILED: {', '.join(failed)}" if failed else "every part ran, every requirement holds")
    return int(bool(failed))


def run_parts(
    names: Sequence[str],
    limit_s: float,
    path: Path | None,
    *,
    small: bool,
    run: Callable[..., Outcome] = run_part,
) -> dict[str, Outcome]:
    """Run the parts and print each row as soon as it is known.

    Args:
        limit_s: When no part is begun any more, and the one that runs is ended.

    Raises:
        OSError: If the file can't be written.
    """
    outcomes: dict[str, Outcome] = {}
    until_s = time.monotonic() + limit_s
    kept = tempfile.TemporaryDirectory(prefix="jaxmorph-", ignore_cleanup_errors=True)
    environment = _environment(kept.name)
    for name in names:
        _write(path, outcomes, running=name)
        left_s = until_s - time.monotonic()
        _say(name)
        if left_s < _LEAST_S:
            late = f"not begun, the {limit_s:g} s are over: run it with --parts {name}"
            outcomes[name] = Outcome(error=late)
        else:
            command = [sys.executable, "-m", "benchmarks.gpu", _CHILD, name]
            command += ["--small"] if small else []
            outcomes[name] = run(command, min(PARTS[name].limit_s, left_s), environment, _say)
        found = outcomes[name]
        _say(f"  {found.seconds:.1f} s  {f'FAILED: {found.error}' if found.error else 'done'}")
    for direction in ("into", "out-of"):
        if rows := tuple(summary(direction, outcomes)):
            outcomes[direction] = Outcome(rows=rows)
            _say("\n".join([f"{direction} slots", *map(str, rows)]))
    _write(path, outcomes, running=None)
    return outcomes


def summary(direction: str, outcomes: Mapping[str, Outcome]) -> Iterator[Row]:
    """Which backend runs take in a direction, and which they should.

    Args:
        outcomes: Of the backends' parts, in the order in which runs try them.
    """
    right: dict[str, dict[str, Any]] = {}
    is_any_here = False
    for part, outcome in outcomes.items():
        if not part.startswith(f"{direction}:") or outcome.is_absent:
            continue
        is_any_here = True
        if outcome.holds:
            figures = {key: value for row in outcome.rows for key, value in row.figures.items()}
            right[part.partition(":")[2]] = figures
    if not right:
        if is_any_here:
            yield Row("runs take", "nothing", "no backend works", False)
        return
    taken, figures = next(iter(right.items()))
    is_judged = figures["platform"] != "cpu"
    gentle = figures["slowdown"] <= MOST_SLOWDOWN
    note = f"matmuls {figures['slowdown']:+.1%}, at most {MOST_SLOWDOWN:+.0%} on a GPU"
    yield Row("runs take", taken, note, bool(gentle) if is_judged else None)
    fit = {name: own for name, own in right.items() if own["slowdown"] <= MOST_SLOWDOWN} or right
    best = max(fit, key=lambda name: fit[name]["gb_per_s"])
    note = f"{fit[best]['gb_per_s']:.1f} GB/s, matmuls {fit[best]['slowdown']:+.1%}"
    yield Row("recommended", best, note if is_judged else "times on a CPU mean nothing")


def _write(path: Path | None, outcomes: Mapping[str, Outcome], *, running: str | None) -> None:
    """Write what is known so far; `running` is the part that may end badly, None at the end."""
    if path is None:
        return
    parts = {name: {"holds": own.holds, **asdict(own)} for name, own in outcomes.items()}
    holds = running is None and all(own.holds for own in outcomes.values())
    known = {"done": running is None, "running": running, "holds": holds, "parts": parts}
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def _environment(folder: str) -> dict[str, str]:
    """What children have in theirs.

    JAX would take three quarters of a GPU's memory, where two processes and the driver want some.
    And XLA tries many kernels for each product, for seconds: all children keep what it has chosen
    in one folder, but no compiled programs. A cache that the user has named stays.
    """
    shared = {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9",
    }
    own = {} if "JAX_COMPILATION_CACHE_DIR" in os.environ else shared
    return {**os.environ, **own, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Checks that jaxmorph computes right on this GPU, and how fast.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--two-gpus", action="store_true", help="check what needs two GPUs")
    parser.add_argument("--parts", help=f"some of {','.join(PARTS)}; by default those of one GPU")
    parser.add_argument("--small", action="store_true", help="small sizes, as without a GPU")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, metavar="S", help="for all parts (%(default)g)"
    )
    chosen = parser.parse_args(arguments)
    by_default = TWO_GPUS if chosen.two_gpus else ONE_GPU
    chosen.parts = chosen.parts.split(",") if chosen.parts else list(by_default)
    if unknown := [name for name in chosen.parts if name not in PARTS]:
        parser.error(f"--parts: got {', '.join(unknown)}, expected some of {', '.join(PARTS)}")
    return chosen


def _say(text: object) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
