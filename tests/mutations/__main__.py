"""Breaks the product on purpose and says whether its tests notice: `python -m tests.mutations`.

Each mutation of `mutations.toml` is made by itself in a copy of the tree, and the tests that should
notice it run there until the first failure. One that is missed, and wasn't when it was recorded,
means that a test has been lost.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutations.toml")
_ONE_TEST_S, _ALL_TESTS_S = 60, 300  # a mutation may make a test hang
_WITHOUT_RANKS = "not (multiprocess or netns or long)"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_NO_TESTS = (4, 5)  # pytest's exit codes


@dataclass(frozen=True)
class Mutation:
    """One mistake; `mutations.toml` says what each field is."""

    name: str
    file: str
    original: str
    broken: str
    tests: tuple[str, ...]
    missed: str = ""


class Outcome(StrEnum):
    """What the tests say."""

    CAUGHT = "caught"
    MISSED = "missed"
    FAILS_ANYWAY = "tests fail without it"


@dataclass(frozen=True)
class Result:
    """What became of a mutation; `by` is the first test that failed, or that they hung."""

    name: str
    outcome: Outcome
    by: str
    seconds: float


def load() -> list[Mutation]:
    """Every mutation, in the order of the list."""
    found = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutation"]
    return [Mutation(**{**each, "tests": tuple(each["tests"])}) for each in found]


def faults(mutations: Sequence[Mutation], root: Path = ROOT) -> Iterator[str]:
    """What keeps mutations from being made: code or tests that moved and left them behind."""
    for name, count in Counter(each.name for each in mutations).items():
        if count > 1:
            yield f"{name}: the name of {count} mutations"
    for each in mutations:
        path = root / each.file
        count = path.read_text(encoding="utf-8").count(each.original) if path.is_file() else 0
        if count != 1:
            yield f"{each.name}: {each.file} has its original text {count} times, expected once"
        if each.broken == each.original:
            yield f"{each.name}: it changes nothing"
        for test in each.tests:
            if not (root / test.partition("::")[0]).exists():
                yield f"{each.name}: there is no {test}"


class Tree:
    """A copy of the tree in which mutations are made and tests run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout
        for name in filter(None, names.decode().split("\0")):
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        self._passes = cache(lambda tests: self._first_failure(tests) is None)

    def try_out(self, mutation: Mutation) -> Result:
        """Makes a mutation, runs its tests and takes it back."""
        began_s = time.monotonic()
        path = self._folder / mutation.file
        source = path.read_text(encoding="utf-8")
        path.write_text(source.replace(mutation.original, mutation.broken), encoding="utf-8")
        try:
            failed = self._first_failure(mutation.tests)
        finally:
            path.write_text(source, encoding="utf-8")
        if failed is None:
            outcome = Outcome.MISSED
        else:
            outcome = Outcome.CAUGHT if self._passes(mutation.tests) else Outcome.FAILS_ANYWAY
        return Result(mutation.name, outcome, failed or "", round(time.monotonic() - began_s, 1))

    def _first_failure(self, tests: tuple[str, ...]) -> str | None:
        """The first test that fails; None: all pass."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE"]
        options = ["-p", "no:cacheprovider", "-o", f"timeout={_ONE_TEST_S}", "-m", _WITHOUT_RANKS]
        environment = os.environ | {
            "PYTHONPATH": str(self._folder),  # before an editable installation of the real tree
            "PYTHONDONTWRITEBYTECODE": "1",  # a mutation may leave a file's size and time as it was
        }
        running = subprocess.Popen(
            [*command, *options, *tests],
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = running.communicate(timeout=_ALL_TESTS_S)
        except subprocess.TimeoutExpired:
            return "the tests hang"
        finally:
            _end(running)
        if running.returncode in _NO_TESTS:
            raise RuntimeError(f"no tests in {', '.join(tests)}:\n{said}")
        found = _FAILED.search(said)
        return None if running.returncode == 0 else found[1] if found else "the tests ended early"


def _end(process: "subprocess.Popen[str]") -> None:
    """Ends what may be left of a run of tests: it leads a group of processes of its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def run(mutations: Sequence[Mutation]) -> Iterator[Result]:
    """Tries mutations out, one after another."""
    with tempfile.TemporaryDirectory(prefix="mutations-", ignore_cleanup_errors=True) as folder:
        tree = Tree(Path(folder))
        yield from map(tree.try_out, mutations)


def main() -> int:
    """Runs the command; 1 where something keeps a mutation from being made or a test was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", action="append", help="those whose name or file has this text")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--check", action="store_true", help="only see that all can be made")
    arguments = parser.parse_args()
    mutations = [
        each
        for each in load()
        if not arguments.only or any(text in each.name + each.file for text in arguments.only)
    ]
    if not mutations:
        parser.error("there is no such mutation")
    if found := list(faults(mutations)):
        print("\n".join(found))
        return 1
    if arguments.check:
        print(f"{len(mutations)} mutations can be made")
        return 0
    results: list[Result] = []
    for result in run(mutations):
        results.append(result)
        by = f" by {result.by}" if result.by else ""
        print(f"{result.seconds:6.1f} s  {result.outcome}{by}: {result.name}", flush=True)
    caught = sum(each.outcome is Outcome.CAUGHT for each in results)
    print(f"{caught} of {len(results)} caught")
    if arguments.json:
        values = {"caught": caught, "total": len(results), "mutations": [*map(asdict, results)]}
        arguments.json.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    known = {each.name for each in mutations if each.missed}
    return int(any(not (r.outcome is Outcome.CAUGHT or r.name in known) for r in results))


if __name__ == "__main__":
    sys.exit(main())
