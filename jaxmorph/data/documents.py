"""Finds and reads the text to train on: UTF-8 documents in a fixed order."""

import os
import sysconfig
from pathlib import Path

from jaxmorph.errors import UserError

TEXT_SUFFIXES = frozenset(
    {".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml"}
    | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu"}
    | {".java", ".js", ".ts", ".go", ".rs", ".sh"}
)
STANDARD_LIBRARY_BYTES = 8 * 2**20  # thousands of small steps, read in a fraction of a second
_NOT_THE_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})


def standard_library_documents() -> list[bytes]:
    """The sources of Python's standard library: real text that every machine has.

    Files come in the order of their paths, up to 8 MiB in all, without tests, installed packages
    and files that are not UTF-8.

    Raises:
        UserError: this Python has no sources on disk.
    """
    documents, total = [], 0
    library = Path(sysconfig.get_path("stdlib"))
    for path in _files_below(library, frozenset({".py"}), without=_NOT_THE_LIBRARY):
        text = _text_or_nothing(path)
        if total + len(text) > STANDARD_LIBRARY_BYTES:
            break
        if text:
            documents.append(text)
            total += len(text)
    if not documents:
        raise UserError("data.path: got null, but this Python keeps no sources; name a text file")
    return documents


def text_documents(path: Path) -> list[bytes]:
    """Reads a text file, or the files below a folder that have one of `TEXT_SUFFIXES`.

    Files come in the order of their paths. Hidden files and folders, empty files and links to
    folders are skipped.

    Raises:
        UserError: there is no such path, nothing to read in it, or a file is not UTF-8 text.
    """
    if not path.is_dir():
        return [_read_text(path)]
    files = _files_below(path, TEXT_SUFFIXES)
    if not files:
        suffixes = " ".join(sorted(TEXT_SUFFIXES))
        arrays = _files_below(path, frozenset({".bin"}))
        one = f"; or name a token array: data.path={arrays[0]}" if arrays else ""
        raise UserError(f"data.path: {path}: no text file in this folder, expected {suffixes}{one}")
    documents = [text for text in map(_read_text, files) if text]
    if not documents:
        raise UserError(f"data.path: {path}: every text file in this folder is empty")
    return documents


def _files_below(
    folder: Path, suffixes: frozenset[str], without: frozenset[str] = frozenset()
) -> list[Path]:
    """The folder's files with these suffixes, recursively, sorted by path."""
    found = []
    for directory, subdirectories, names in os.walk(folder, onerror=_refuse):
        subdirectories[:] = [
            name for name in subdirectories if not name.startswith(".") and name not in without
        ]
        found += [
            Path(directory, name)
            for name in names
            if not name.startswith(".") and Path(name).suffix.lower() in suffixes
        ]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _refuse(error: OSError) -> None:
    raise UserError(f"data.path: {error.filename}: cannot be listed: {error.strerror}") from error


def _text_or_nothing(path: Path) -> bytes:
    """A file's text, or nothing if it cannot be read."""
    try:
        return _read_text(path)
    except UserError:
        return b""


def _read_text(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise UserError(f"data.path: {path}: got neither a file nor a folder")
    try:
        text = path.read_bytes()
        text.decode("utf-8")
    except FileNotFoundError as error:
        raise UserError(
            f"data.path: {path}: no such file or folder, "
            "expected a text file, a folder of text files, or a .bin token array"
        ) from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"data.path: {path}: not UTF-8 text (byte {error.start} is {byte:#04x})"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"data.path: {path}: cannot be read: {reason}") from error
    return text
