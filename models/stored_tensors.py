"""Reads and writes tensors in safetensors files: one file, or several with an index."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import ml_dtypes  # noqa: F401  # registers bfloat16 with numpy, which reading such tensors needs
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
_FLOATS = ("F16", "BF16", "F32", "F64")
_EXPECTED = f"expected a folder with {WEIGHTS_NAME} or {INDEX_NAME}, or one of these files"


@dataclass(frozen=True)
class StoredTensors:
    """Tensors by name, loaded one at a time when they are read.

    Attributes:
      path: the path that was opened, for errors.
      folder: may have a config.json.
      files: the file that holds each tensor.
    """

    path: str
    folder: Path
    files: Mapping[str, Path]

    @classmethod
    def open(cls, path: str) -> Self:
        """Opens a .safetensors file, an index of several, or a folder with either.

        Raises:
          ValueError: there is no such file, or it has another format.
        """
        file = _weights_file(Path(path))
        if file.suffix == ".json":
            return cls(path, file.parent, _indexed(file))
        return cls(path, file.parent, dict.fromkeys(_shapes(file), file))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, from the files' headers.

        Raises:
          ValueError: a file is missing, or lacks a tensor that the index says it has.
        """
        shapes = {}
        for file in sorted(set(self.files.values())):
            found = _shapes(file)
            for name in (name for name, held_by in self.files.items() if held_by == file):
                if name not in found:
                    raise ValueError(f"{file}: got no {name}, which the index says it has")
                shapes[name] = found[name]
        return shapes

    @cached_property
    def config(self) -> dict[str, Any]:
        """The contents of the config.json beside the files; empty without one."""
        file = self.folder / CONFIG_NAME
        return _read_json(file) if file.is_file() else {}

    def read(self, name: str, first_rows: int | None = None) -> np.ndarray:
        """Returns a tensor, or only its first rows, as float32.

        Raises:
          ValueError: it does not hold floats.
        """
        with safe_open(self.files[name], framework="np") as file:
            part = file.get_slice(name)
            if part.get_dtype() not in _FLOATS:
                expected = ", ".join(_FLOATS)
                raise ValueError(
                    f"{self.path}: {name}: got {part.get_dtype()}, expected one of {expected}"
                )
            tensor = part[:first_rows] if first_rows else file.get_tensor(name)
        return np.asarray(tensor, np.float32)


def write_tensors(
    folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> None:
    """Writes one safetensors file and config.json to a folder, in place of earlier ones.

    Raises:
      OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    unfinished = folder / f".{WEIGHTS_NAME}.unfinished"
    # `transformers` refuses files without this entry, which names the framework of the layout.
    save_file(whole, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / WEIGHTS_NAME)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _weights_file(path: Path) -> Path:
    """The file to open for a path, which may be a folder."""
    candidates = [path / WEIGHTS_NAME, path / INDEX_NAME] if path.is_dir() else [path]
    for file in candidates:
        if file.is_file() and file.suffix in (".safetensors", ".json"):
            return file
    got = "no such file or folder" if not path.exists() else "no safetensors there"
    raise ValueError(f"{path}: {got}, {_EXPECTED}")


def _indexed(file: Path) -> dict[str, Path]:
    files = _read_json(file).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{file}: got no weight_map of names to files, {_EXPECTED}")
    return {name: file.parent / part for name, part in files.items()}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: got {type(content).__name__}, expected a JSON object")
    return content


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="np") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {name: tuple(part.get_shape()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: cannot be read as safetensors: {error}") from error
