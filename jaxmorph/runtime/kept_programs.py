"""A rank's compiled programs on disk, for the processes that take its place later.

Only process 0 of a run writes JAX's persistent compilation cache, and no public setting changes
that. Each rank has programs of its own, so the other ranks would find nothing there. Therefore each
rank keeps its own, with `jax.experimental.serialize_executable`.

A damaged program can compute other results, end the process or hang. So each file begins with the
length and digest of what follows, and is deleted where they differ. A program that is wrong in
another way runs only once: a rank that a signal ends before its first step leaves a mark that names
the programs it has read, and the next start compiles them again. A program that nothing has read
for 30 days is deleted.
"""

import errno
import fcntl
import hashlib
import logging
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import IO, TYPE_CHECKING
from uuid import uuid4

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled, Lowered

from jaxmorph.stage.compiling import compile_by
from jaxmorph.transport.host import num_processors

if TYPE_CHECKING:  # the GPU check runs without the configuration's libraries
    from jaxmorph.config import Config

FOLDER = "compilation_cache"
VARIABLE = "JAXMORPH_CACHE_DIR"
"""Names the user's cache in place of `~/.cache/jaxmorph`."""

_log = logging.getLogger(__name__)
_COMPILATION = "/jax/core/compile/backend_compile_duration"
_NUM_PARTITIONS = re.compile(r"mhlo.num_partitions = (\d+)")
_PYTHON_CALL = re.compile(r"@xla_\w*python_\w*callback")  # in a program's text
_PROGRAM, _NEW, _MARK = ".program", ".new", ".starts"
_UNUSED_S = 30 * 24 * 3600.0
_FOR_OTHERS = 0o022
_CPU_INFO = Path("/proc/cpuinfo")
_CPU_LINES = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")


class KeptPrograms:
    """The programs of one rank for its first devices.

    Args:
        folder: Where they are; created with the first one. Anyone who can write there can make this
            process run any code.
        on_read: Called with a file's name before its program is used.
    """

    def __init__(self, folder: Path, on_read: Callable[[str], None] = lambda name: None) -> None:
        self.folder = folder
        self._on_read = on_read
        self._platform: tuple[str, ...] | None = None

    def compile(self, lowered: Lowered) -> Compiled:
        """The program as an earlier process kept it; else compile and keep it.

        A program that calls Python (`jax.debug.print`) works only in the process that compiled it.
        """
        text = lowered.as_text()
        if _PYTHON_CALL.search(text):
            return lowered.compile()
        path = self.folder / f"{self._key(lowered, text)}{_PROGRAM}"
        return self._kept(path, lowered, _num_devices(text)) or self._compiled(path, lowered)

    def _kept(self, path: Path, lowered: Lowered, num_devices: int) -> Compiled | None:
        """The program in a file; None if there is none that can be used."""
        if not path.exists():
            return None
        self._on_read(path.name)
        try:
            with suppress(OSError):  # it may be another user's
                os.utime(path)
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
            # Other runs may share the folder, so write under a unique name and rename.
            new = path.with_suffix(f".{uuid4().hex}{_NEW}")
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
    config: "Config", directory: Path | None, rank: int
) -> Iterator[Callable[[], None]]:
    """Make this process keep its stage's programs while the context is open.

    Args:
        directory: The run's; None: it has none.

    Yields:
        A function to call once a step is done: the programs that were read have proved to run.
    """
    folder = _folder(config.restart_policy.compilation_cache, directory)
    if folder is None:
        yield lambda: None
        return
    own = folder.absolute() / f"rank_{rank}"
    _remove_suspects(own)
    mark = _Mark(own)
    compile_by(KeptPrograms(own, mark.add).compile)

    def programs_ran() -> None:
        mark.remove()
        _remove_unused(folder)

    try:
        yield programs_ran
    finally:  # no signal has ended this process
        mark.remove()
        compile_by(None)


def _folder(wanted: bool | str, directory: Path | None) -> Path | None:
    """Where programs are kept; None: nowhere."""
    if wanted == "auto":
        return _users_folder()
    if isinstance(wanted, bool):
        return directory / FOLDER if wanted and directory is not None else None
    return Path(wanted)


def _users_folder() -> Path | None:
    """The user's folder for all runs; None if there is none that only the user can write to."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(os.environ.get(VARIABLE) or Path(home) / "jaxmorph")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & _FOR_OTHERS:
            raise PermissionError(errno.EPERM, "others can write there", str(folder))
    except (OSError, RuntimeError) as error:  # the latter: there is no home directory
        _log.warning("no compiled program is kept: %s", error)
        return None
    return folder


class _Mark:
    """Names the programs that this process reads before its first step.

    It stays locked while the process lives, so that other processes can see whether a signal has
    ended it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{uuid4().hex}{_MARK}"
        self._file: IO[str] | None = None
        with suppress(OSError):  # a folder that can't be written to has no programs
            folder.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(_NEW)
            file = new.open("w")
            with suppress(OSError):  # some file systems know no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            new.rename(self._path)
            self._file = file

    def add(self, name: str) -> None:
        """Name a program that is about to be read."""
        with suppress(OSError):
            if self._file is not None:
                self._file.write(f"{name}\n")
                self._file.flush()

    def remove(self) -> None:
        """Remove the mark: the programs have not ended the process."""
        _remove(self._path)


def _remove_suspects(folder: Path) -> None:
    """Remove programs whose process was ended by a signal before its first step."""
    for mark in folder.glob(f"*{_MARK}"):
        names = _names_left(mark)
        if names is None:
            continue
        for name in names:
            _remove(folder / Path(name).name)
        _remove(mark)
        if names:
            _log.warning(
                "%s: a process ended before its first step: what it had read is compiled again",
                mark,
            )


def _names_left(mark: Path) -> list[str] | None:
    """The programs that a process had read before it ended; None: it lives."""
    try:
        with mark.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            except OSError:  # without locks it may live; compiling again is safe
                pass
            return file.read().splitlines()
    except OSError:  # its process has just removed it
        return None


def _remove_unused(folder: Path) -> None:
    for path in folder.glob("rank_*/*"):
        with suppress(OSError):  # another rank may have removed it
            is_own = path.suffix in (_PROGRAM, _NEW, _MARK)
            if is_own and time.time() - path.stat().st_mtime > _UNUSED_S:
                path.unlink()


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
