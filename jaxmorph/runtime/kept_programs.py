"""A rank's compiled programs on disk, for the process that takes its place after a restart.

Only process 0 of a run writes JAX's persistent compilation cache, and no public setting changes
that. Each rank has programs of its own, so the other ranks would find nothing there. Therefore each
rank keeps its own, with `jax.experimental.serialize_executable`.

A damaged program can compute other results, end the process or hang. So each file begins with the
length and digest of what follows, and is deleted where they differ. Whatever else is wrong with a
program, it is run only once: a rank that ends by a signal before its first step leaves a mark, and
the next start compiles everything again.
"""

import hashlib
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled, Lowered

from jaxmorph.stage.compiling import compile_by
from jaxmorph.transport.host import num_processors

if TYPE_CHECKING:  # the GPU check runs without the configuration's libraries
    from jaxmorph.config import Config

FOLDER = "compilation_cache"

_log = logging.getLogger(__name__)
_COMPILATION = "/jax/core/compile/backend_compile_duration"
_NUM_PARTITIONS = re.compile(r"mhlo.num_partitions = (\d+)")
_PYTHON_CALL = re.compile(r"@xla_\w*python_\w*callback")  # in a program's text
_CPU_INFO = Path("/proc/cpuinfo")
_CPU_LINES = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")


class KeptPrograms:
    """The programs of one rank for its first devices.

    Args:
        folder: Where they are; created with the first one. Anyone who can write there can make this
            process run any code.
        reads: Whether programs of earlier processes are used; if not, they are replaced.
    """

    def __init__(self, folder: Path, *, reads: bool = True) -> None:
        self.folder = folder
        self._reads = reads
        self._platform: tuple[str, ...] | None = None

    def compile(self, lowered: Lowered) -> Compiled:
        """The program as an earlier process kept it; else compile and keep it.

        One that calls Python, as for `jax.debug.print`, works only in the process that compiled it.
        """
        text = lowered.as_text()
        if _PYTHON_CALL.search(text):
            return lowered.compile()
        path = self.folder / f"{self._key(lowered, text)}.program"
        return self._kept(path, lowered, _num_devices(text)) or self._compiled(path, lowered)

    def _kept(self, path: Path, lowered: Lowered, num_devices: int) -> Compiled | None:
        """The program in a file; None if there is none that can be used."""
        if not self._reads or not path.exists():
            return None
        try:
            return serialize_executable.deserialize_and_load(
                _unsealed(path.read_bytes()),
                jax.tree.structure(lowered.args_info),
                lowered.out_tree,
                execution_devices=jax.local_devices()[:num_devices],
            )
        except Exception as error:  # any broken file: the program can be compiled again
            _log.warning("%s: %s: %s; it is compiled again", path, type(error).__name__, error)
            _remove(path)
            return None

    def _compiled(self, path: Path, lowered: Lowered) -> Compiled:
        program = lowered.compile()
        try:
            written, _, _ = serialize_executable.serialize(program)
            self.folder.mkdir(parents=True, exist_ok=True)
            # Other runs may share the folder, so write under an own name and rename.
            new = path.with_name(f"{path.name}.{os.getpid()}.new")
            new.write_bytes(_seal(written) + written)
            new.replace(path)
        except (
            *(OSError, ValueError, NotImplementedError, pickle.PicklingError),
            jax.errors.JaxRuntimeError,  # of a platform that can't write programs
        ) as error:
            _log.warning("%s: cannot be kept: %s", path, error)
        return program

    def _key(self, lowered: Lowered, text: str) -> str:
        """A name that depends on the program and the platform."""
        if self._platform is None:
            self._platform = tuple(_platform())
        takes = str(lowered.args_info)  # with unused arguments, which the text leaves out
        parts = (text, takes, str(lowered.out_tree), *self._platform)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _num_devices(text: str) -> int:
    """On how many devices a program runs."""
    found = _NUM_PARTITIONS.search(text)
    return int(found[1]) if found else 1


def _seal(program: bytes) -> bytes:
    """The first line of a program's file."""
    return f"{len(program)} bytes {hashlib.sha256(program).hexdigest()}\n".encode()


def _unsealed(content: bytes) -> bytes:
    """The program in a file's content.

    Raises:
        ValueError: It is not what was written.
    """
    seal, _, program = content.partition(b"\n")
    if seal + b"\n" != _seal(program):
        raise ValueError(f"got {len(program)} bytes, which are not those that were written")
    return program


def _platform() -> Iterator[str]:
    """Everything besides the program that determines what XLA compiles."""
    device = jax.local_devices()[0]
    yield from (version("jax"), version("jaxlib"), device.client.platform_version)
    yield from (device.platform, device.device_kind, str(device.id))
    yield from (os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    yield str(jax.config.read("jax_disable_most_optimizations"))
    if device.platform == "cpu":
        yield _processor()
        # XLA cuts programs for CPUs into as many parts as its pool has threads, which depend on:
        yield os.environ.get("NPROC", "")
        yield str(jax.local_device_count())
        yield str(num_processors())


def _processor() -> str:
    """The processor's features: XLA compiles machine code for them."""
    if not _CPU_INFO.exists():
        return ""
    lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(_CPU_LINES)}))


@contextmanager
def keep_compiled(
    config: "Config", directory: Path, rank: int, *, starts_again: bool = False
) -> Iterator[Callable[[], None]]:
    """Make this process keep its stage's programs from now on, if its run may restart.

    Args:
        starts_again: Whether its ranks are started again in any case.

    Yields:
        A function to call once a step is done: the programs that were read have proved to run.
    """
    wanted = config.restart_policy.compilation_cache
    if wanted is False or not (config.may_restart or starts_again):
        yield lambda: None
        return
    folder = (directory / FOLDER if wanted is True else Path(wanted)).absolute()
    mark = directory / f".rank_{rank}_starts"  # not in `folder`, which other runs may share
    was_killed = mark.exists()
    if was_killed:
        _log.warning("%s: a process ended before its first step: all is compiled again", mark)
    compile_by(KeptPrograms(folder / f"rank_{rank}", reads=not was_killed).compile)
    remove = partial(_remove, mark)
    try:
        with suppress(OSError):
            mark.touch()
        yield remove
    finally:  # no signal has ended this process
        remove()


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


class CompilationCounter:
    """Counts the programs that this process compiles: a change of schedule must compile none."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._record)

    def _record(self, event: str, duration_secs: float, **details: str | int) -> None:
        del duration_secs, details
        if event == _COMPILATION:
            self.count += 1
