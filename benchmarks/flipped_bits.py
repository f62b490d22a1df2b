"""Whether a run believes a damaged file: `python -m benchmarks.flipped_bits [--flips N]`.

Trains a small model once, and cuts a copy back to what a killed run leaves. Then, again and again,
flips bits in files of such a copy and resumes it; kinds of files take turns. Losses, gradient norms
and the last parameters must be those of the run that was left alone, or its events say what is not.
No command may end with a traceback, hang, or find no whole checkpoint. With `--json` it goes on
where the file ends, and adds to it.

Up to four flips share a resume, each in another kind of file, none of which is read instead of
another: the files of checkpoints are one sort, and a flip in the steps or the configuration is
alone, because results may differ if an event says so. Bits that are the undisturbed run's clear all
flips of a resume. After anything else each of them is repeated alone, so that what came of it is
its own.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.judgement import Computed, computed_by, differences
from benchmarks.results import ROOT, Bar, finish, provenance, write_json
from jaxmorph.compare.provenance import load_averages
from jaxmorph.records import Event, EventKind
from jaxmorph.report.run_directory import EVENTS, METRICS, read_records

STEPS, SAVED, KILLED = 20, 16, 18
_PATIENCE_S = 180.0
_TRACE = "step,links,latency_ms\n6,0-1,25\n"  # so that a slow link is found, and written down
_CONFIG = {
    "run": {"steps": STEPS, "seed": 5},
    "model": {"preset": "tiny", "width": 16, "num_layers": 3, "num_heads": 2},
    "data": {"sequence_length": 8},
    "parallelism": {"stages": 2, "layers": "auto"},
    "batch": {"microbatches": 4, "microbatch_size": 1},
    "adaptation": {"enabled": True},
    "trace": {"every_steps": 5},
    "checkpoint": {"every_steps": 4, "keep": 9},
    "restart_policy": {"compilation_cache": True},
}
KINDS: Mapping[str, str] = {
    "steps": METRICS,
    "events": EVENTS,
    "configuration": "config.yaml",
    "profile": "profile.json",
    "links": "links.json",
    "recovery": "recovery.json",
    "cut of layers": "layers.json",
    "observations": "control/*.jsonl",
    "trace": "trace/*.json",
    "picture": "*.png",
    "log": "logs/**/*.log",
    "program": "compilation_cache/**/*.program",
    "manifest": "checkpoints/*/manifest.json",
    "seal": "checkpoints/*/manifest.seal",
    "list of files": "checkpoints/*/*.files",
    "state": "checkpoints/*/virtual_stage_*/**/*",
}
"""The kinds of files in a run's directory, and where they are."""
_TOGETHER = 4
_ALONE = ("steps", "configuration")
_OF_CHECKPOINTS = ("manifest", "seal", "list of files", "state")
_OTHERS = [kind for kind in KINDS if kind not in (*_ALONE, *_OF_CHECKPOINTS)]
IN_TURNS = (  # so that neighbours may be resumed together
    _ALONE[0], _OF_CHECKPOINTS[0], *_OTHERS[:3], _OF_CHECKPOINTS[1], *_OTHERS[3:6],
    _ALONE[1], _OF_CHECKPOINTS[2], *_OTHERS[6:8], _OF_CHECKPOINTS[3], *_OTHERS[8:],
)  # fmt: skip
"""The order in which kinds of files take turns."""


@dataclass(frozen=True)
class Flip:
    """A flipped bit, and what came of it.

    Attributes:
        file: In the run's directory.
        verdict: `same`, `reported` (the results differ, and events say so), or what must not be.
        reported: What the events say is damaged or changed, by any flip of its resume.
        took_s: Its share of its resume.
        together: How many flips were resumed at once.
    """

    kind: str
    file: str
    bit: int
    verdict: str
    reported: tuple[str, ...]
    took_s: float
    together: int = 1

    @property
    def holds(self) -> bool:
        """Whether this may happen."""
        return self.verdict in ("same", "reported")


def whole_run(folder: Path) -> Path:
    """Train undisturbed, unless an earlier go did; returns the run's directory."""
    config, out = folder / "flipped_bits.yaml", folder / "whole"
    if (out / "checkpoints" / f"step_{STEPS}").exists():
        return out
    trace = folder / "links.csv"
    trace.write_text(_TRACE)
    config.write_text(json.dumps(_CONFIG | {"emulation": {"trace": str(trace)}}))  # YAML too
    code, said = _train([str(config), f"run.dir={out}"])
    if code != 0:
        raise SystemExit(f"the undisturbed run failed:\n{said}")
    return out


def killed_copy(whole: Path, out: Path) -> None:
    """What the run had on disk when it was killed after `KILLED` steps; it saved at `SAVED`."""
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / f"step_{STEPS}")
    for name in (METRICS, EVENTS):
        lines = (whole / name).read_text().splitlines(keepends=True)
        kept = (line for line in lines if json.loads(line)["step"] < KILLED)
        (out / name).write_text("".join(kept))


def flip_a_bit(path: Path, rng: random.Random) -> int:
    """Flip one bit of a file; returns which."""
    content = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return bit


def files_of(run: Path, kind: str) -> list[Path]:
    """The files of a kind that have a bit to flip."""
    found = (path for path in sorted(run.glob(KINDS[kind])) if path.is_file())
    return [path for path in found if path.stat().st_size]


def groups_of(kinds: Sequence[str], first: int, end: int) -> Iterator[tuple[tuple[int, str], ...]]:
    """The flips that are resumed together, by their numbers and kinds; kinds take turns."""
    group: list[tuple[int, str]] = []
    for number in range(first, end):
        kind = kinds[number % len(kinds)]
        if group and not _may_join(kind, [other for _, other in group]):
            yield tuple(group)
            group = []
        group.append((number, kind))
    if group:
        yield tuple(group)


def _may_join(kind: str, others: Sequence[str]) -> bool:
    if len(others) == _TOGETHER or {kind, *others} & {*_ALONE} or kind in others:
        return False
    return kind not in _OF_CHECKPOINTS or not {*others} & {*_OF_CHECKPOINTS}


def flipped(
    whole: Path, expected: Computed, folder: Path, group: Sequence[tuple[int, str]], seed: int
) -> list[Flip]:
    """Flip a bit per member of a group in a copy of the run, resume it, and judge what comes."""
    out, began_s = folder / "out", time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    killed_copy(whole, out)
    bits = []
    for number, kind in group:
        rng = random.Random(f"{seed} {number}")
        path = rng.choice(files_of(out, kind))
        bits.append((kind, str(path.relative_to(out)), flip_a_bit(path, rng)))
    code, said = _train(["--resume", str(out)])
    verdict, reported = _verdict(code, said), ()
    if not verdict:
        reported = tuple(reports_of(read_records(out / EVENTS, Event)))
        verdict = judged(differences(computed_by(out), expected), reported)
    if verdict != "same" and len(group) > 1:
        return [flip for each in group for flip in flipped(whole, expected, folder, [each], seed)]
    took_s = round((time.monotonic() - began_s) / len(group), 1)
    return [
        Flip(kind, file, bit, verdict, reported, took_s, len(group)) for kind, file, bit in bits
    ]


def _verdict(code: int | None, said: str) -> str:
    """What is wrong with how a command ended; "" if it ended well."""
    if code is None:
        return "hung"
    if "Traceback" in said:
        return f"traceback: {said[-300:]}"
    return "" if code == 0 else f"exit code {code}: {said[-300:]}"


def reports_of(events: Sequence[Event]) -> Iterator[str]:
    """What events say is damaged, or is not as it was."""
    for event in events:
        if event.kind in (EventKind.FILES_DAMAGED, EventKind.CHECKPOINT_DAMAGED):
            yield event.detail
        elif event.kind == EventKind.RESUMED and "; changed: " in event.detail:
            yield event.detail.partition("; changed: ")[2]


def judged(wrong: Sequence[str], reported: Sequence[str]) -> str:
    """`same`, `reported` or `silently different`, by what is different and what events say."""
    if not wrong:
        return "same"
    says_changed = any("(was " in line for line in reported)
    missing = [line for line in wrong if "got None" in line or "lines of steps" in line]
    says_missing = any(f"{METRICS} lacks" in line for line in reported)
    if says_changed or (says_missing and len(missing) == len(wrong)):
        return "reported"
    return f"silently different: {wrong[0]}"


def _train(words: Sequence[str]) -> tuple[int | None, str]:
    """Run `jaxmorph train`; its exit code, None if it hung, and what it said."""
    command = [sys.executable, "-m", "jaxmorph", "train", *words]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return None, process.communicate()[0]
    return process.returncode, said


def bars(flips: Sequence[Flip]) -> Iterator[Bar]:
    """What should hold of all flips."""
    silent = sum(each.verdict.startswith("silently") for each in flips)
    yield Bar("silently different results", silent, at_most=0)
    tracebacks = sum(each.verdict.startswith("traceback") for each in flips)
    yield Bar("tracebacks", tracebacks, at_most=0)
    yield Bar("hangs", sum(each.verdict == "hung" for each in flips), at_most=0)
    refused = sum(each.verdict.startswith("exit code") for each in flips)
    yield Bar("runs that were not resumed", refused, at_most=0)


def main() -> int:
    """Print a line per flip, then the bars; 1 if one of them is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=1e6, help="then no more flips")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="keeps the undisturbed run for a further go")
    arguments = parser.parse_args()
    flips, goes = _earlier(arguments.json)
    goes.append(provenance("benchmarks.flipped_bits"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        whole = whole_run(folder)
        expected = computed_by(whole)
        kinds = [kind for kind in IN_TURNS if files_of(whole, kind)]
        until_s = time.monotonic() + 60 * arguments.minutes
        for group in groups_of(kinds, len(flips), len(flips) + arguments.flips):
            if time.monotonic() > until_s:
                break
            for flip in flipped(whole, expected, folder, group, arguments.seed):
                flips.append(flip)
                said = "; ".join(flip.reported)
                file = f"{flip.file}, bit {flip.bit}"
                print(f"{len(flips) - 1:4} {file}: {flip.verdict}  {said}", flush=True)
            goes[-1] |= {"until": len(flips), "load_after": load_averages()}
            if arguments.json:
                values = {"goes": goes, "flips": [asdict(each) for each in flips]}
                write_json(arguments.json, values)
    counts = Counter(each.verdict for each in flips if each.holds)
    print(f"{len(flips)} flips: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    return finish([*bars(flips)], None, {})


def _earlier(path: Path | None) -> tuple[list[Flip], list[dict[str, Any]]]:
    """The flips that a file has, and when they were made."""
    if path is None or not path.exists():
        return [], []
    found = json.loads(path.read_text())
    flips = [Flip(**each | {"reported": tuple(each["reported"])}) for each in found["flips"]]
    return flips, found["goes"]


if __name__ == "__main__":
    sys.exit(main())
