"""Reads and writes GPT-2's weights in Hugging Face's format: safetensors, in one file or several.

Every tensor is one of our leaves: Hugging Face's matrices are [inputs, outputs] too (its Conv1D).
Queries, keys and values are one matrix in both, but in this order there, and one head after another
here. Names begin with `transformer.` in files of the whole model, but not in those of a model
without its head.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import ml_dtypes  # noqa: F401  # registers bfloat16 with numpy, which reading such tensors needs
import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .config import GPT2Config
from .model import by_heads, by_kinds

Tree = dict[str, Any]

_WEIGHTS_NAME = "model.safetensors"
_INDEX_NAME = "model.safetensors.index.json"
_CONFIG_NAME = "config.json"
_FLOATS = ("F16", "BF16", "F32", "F64")
_EXPECTED = f"expected a folder with {_WEIGHTS_NAME} or {_INDEX_NAME}, or one of these files"


class _Leaf(NamedTuple):
    """A parameter: its path in our tree, its name in the files, and its axes."""

    path: tuple[str, ...]
    name: str
    axes: tuple[str, ...]


_TOKEN = _Leaf(("token",), "wte.weight", ("vocab_size", "width"))
_POSITION = _Leaf(("position",), "wpe.weight", ("sequence_length", "width"))
_LAYER = (
    _Leaf(("attention_norm", "scale"), "ln_1.weight", ("width",)),
    _Leaf(("attention_norm", "bias"), "ln_1.bias", ("width",)),
    _Leaf(("attention", "qkv", "kernel"), "attn.c_attn.weight", ("width", "3 * width")),
    _Leaf(("attention", "qkv", "bias"), "attn.c_attn.bias", ("3 * width",)),
    _Leaf(("attention", "out", "kernel"), "attn.c_proj.weight", ("width", "width")),
    _Leaf(("attention", "out", "bias"), "attn.c_proj.bias", ("width",)),
    _Leaf(("mlp_norm", "scale"), "ln_2.weight", ("width",)),
    _Leaf(("mlp_norm", "bias"), "ln_2.bias", ("width",)),
    _Leaf(("expand", "kernel"), "mlp.c_fc.weight", ("width", "4 * width")),
    _Leaf(("expand", "bias"), "mlp.c_fc.bias", ("4 * width",)),
    _Leaf(("contract", "kernel"), "mlp.c_proj.weight", ("4 * width", "width")),
    _Leaf(("contract", "bias"), "mlp.c_proj.bias", ("width",)),
)
_NORM = (
    _Leaf(("norm", "scale"), "ln_f.weight", ("width",)),
    _Leaf(("norm", "bias"), "ln_f.bias", ("width",)),
)
_OUTPUT = _Leaf(("token",), "lm_head.weight", ("vocab_size", "width"))

_PREFIX = "transformer."
_MASKS = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias")  # constants in older files
_GELU = ("gelu_new", "gelu_pytorch_tanh")  # two names of the same approximation


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
        file = self.folder / _CONFIG_NAME
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


def read_weights(
    config: GPT2Config, path: str, layers: range, is_first: bool, is_last: bool
) -> Tree:
    """Returns one stage's parameters, and loads no other tensor.

    Names and shapes of all tensors are checked, whatever the stage; with no layers, and neither
    first nor last, nothing else happens. Positions beyond the model's sequence length are dropped.
    An untied model that reads tied weights starts with a copy of the embedding in its head.

    Args:
      path: a .safetensors file, an index of several, or a folder with either.

    Returns:
      {"embed": (first stage), "layers": leaves stacked over the stage's layers, "head": (last
      stage)}, float32 numpy arrays.

    Raises:
      ValueError: the files cannot be read, or are not those of this model.
    """
    stored = StoredTensors.open(path)
    prefix = _prefix(stored)
    _check_settings(stored, config)
    _check_tensors(stored, prefix, config)
    params: Tree = {"layers": _read_layers(stored, prefix, layers, config)}
    if is_first:
        positions = stored.read(prefix + _POSITION.name, config.sequence_length)
        params["embed"] = {"token": stored.read(prefix + _TOKEN.name), "position": positions}
    if is_last:
        norm = {leaf.path: stored.read(prefix + leaf.name) for leaf in _NORM}
        output = _read_output(stored, prefix, config)
        params["head"] = unflatten_dict({**norm, _OUTPUT.path: output})
    return params


def write_weights(config: GPT2Config, folder: str, stages: Iterable[tuple[range, Tree]]) -> None:
    """Writes model.safetensors, float32, and the config.json that `transformers` needs to load it.

    Args:
      stages: each stage's layers and parameters, as `read_weights` returns them; in any order.

    Raises:
      ValueError: the stages are not the whole model, each part once.
      OSError: it cannot be written.
    """
    tensors: dict[str, np.ndarray] = {}
    for layers, params in stages:
        for name, array in _named(config, layers, params):
            if name in tensors:
                raise ValueError(f"{name}: got it from two stages, expected it from one")
            tensors[name] = np.asarray(array, np.float32)
    expected = {**_expected(_PREFIX, config), **({} if config.tied else {_OUTPUT.name: ()})}
    if missing := [name for name in expected if name not in tensors]:
        raise ValueError(f"got no stage with {_some(missing)}, expected the whole model")
    _write_tensors(Path(folder), tensors, _settings(config))


def _expected(prefix: str, config: GPT2Config) -> dict[str, _Leaf]:
    """Every name that the files must have; an untied head's matrix comes on top."""
    layers = {
        _in_layer(prefix, layer, leaf): leaf
        for layer in range(config.num_layers)
        for leaf in _LAYER
    }
    return {**{prefix + leaf.name: leaf for leaf in (_TOKEN, _POSITION, *_NORM)}, **layers}


def _in_layer(prefix: str, layer: int, leaf: _Leaf) -> str:
    return f"{prefix}h.{layer}.{leaf.name}"


def _shape(leaf: _Leaf, config: GPT2Config) -> tuple[int, ...]:
    sizes = {
        "vocab_size": config.vocab_size,
        "sequence_length": config.sequence_length,
        "width": config.width,
        "3 * width": 3 * config.width,
        "4 * width": 4 * config.width,
    }
    return tuple(sizes[axis] for axis in leaf.axes)


def _prefix(stored: StoredTensors) -> str:
    for prefix in (_PREFIX, ""):
        if prefix + _TOKEN.name in stored.files:
            return prefix
    raise ValueError(
        f"{stored.path}: got no {_TOKEN.name}, nor one after {_PREFIX}, expected a GPT-2's tensors"
    )


def _check_tensors(stored: StoredTensors, prefix: str, config: GPT2Config) -> None:
    expected = _expected(prefix, config)
    model = f"expected those of a GPT-2 of {config.num_layers} layers"
    if missing := [name for name in expected if name not in stored.files]:
        raise ValueError(f"{stored.path}: got no {_some(missing)}, {model}")
    known = {**expected, _OUTPUT.name: _OUTPUT}
    names = [name for name in stored.files if not _MASKS.fullmatch(name)]
    if unexpected := sorted(name for name in names if name not in known):
        raise ValueError(f"{stored.path}: got {_some(unexpected)} as well, {model}")
    for name in names:
        _check_shape(stored, name, known[name], config)


def _check_shape(stored: StoredTensors, name: str, leaf: _Leaf, config: GPT2Config) -> None:
    shape, expected = stored.shapes[name], _shape(leaf, config)
    is_longer = leaf is _POSITION and len(shape) == 2 and shape[0] > expected[0]
    if shape != expected and not (is_longer and shape[1] == expected[1]):
        least = " at least" if leaf is _POSITION else ""
        raise ValueError(
            f"{stored.path}: {name}: got {list(shape)}, expected{least} {list(expected)} "
            f"({', '.join(leaf.axes)})"
        )


def _settings(config: GPT2Config) -> dict[str, Any]:
    """The config.json of a model of ours."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.sequence_length,
        "n_embd": config.width,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "activation_function": _GELU[0],
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": config.tied,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }


def _check_settings(stored: StoredTensors, config: GPT2Config) -> None:
    """Refuses settings that change the computation but no tensor's shape."""
    own = _settings(config)
    for name in (
        "model_type",
        "n_head",
        "activation_function",
        "layer_norm_epsilon",
        "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx",
    ):
        got = stored.config.get(name, own[name])
        if got != own[name] and not (got in _GELU and own[name] in _GELU):
            raise ValueError(
                f"{stored.path}: config.json: {name}: got {got!r}, expected {own[name]!r}"
            )


def _read_layers(
    stored: StoredTensors, prefix: str, layers: range, config: GPT2Config
) -> dict[str, Any]:
    stacked = {}
    for leaf in _LAYER:
        array = np.empty((len(layers), *_shape(leaf, config)), np.float32)
        for row, layer in zip(array, layers, strict=True):
            columns = stored.read(_in_layer(prefix, layer, leaf))
            row[...] = by_heads(columns, config.num_heads) if _is_qkv(leaf) else columns
        stacked[leaf.path] = array
    return unflatten_dict(stacked)


def _read_output(stored: StoredTensors, prefix: str, config: GPT2Config) -> np.ndarray:
    """The head's matrix: its own, or the embedding's."""
    if _OUTPUT.name not in stored.files:
        return stored.read(prefix + _TOKEN.name)
    own = stored.read(_OUTPUT.name)
    if config.tied and not np.array_equal(own, stored.read(prefix + _TOKEN.name)):
        raise ValueError(
            f"{stored.path}: got a {_OUTPUT.name} other than {_TOKEN.name}, expected tied=false "
            "for such a model"
        )
    return own


def _named(config: GPT2Config, layers: range, params: Tree) -> Iterable[tuple[str, Any]]:
    """Yields a stage's leaves by their names in the files, without a tied head's copy."""
    for leaf in _LAYER:
        for row, layer in enumerate(layers):
            array = _at(params["layers"], leaf)[row]
            columns = by_kinds(array, config.num_heads) if _is_qkv(leaf) else array
            yield _in_layer(_PREFIX, layer, leaf), columns
    if "embed" in params:
        for leaf in (_TOKEN, _POSITION):
            yield _PREFIX + leaf.name, _at(params["embed"], leaf)
    if "head" in params:
        for leaf in _NORM:
            yield _PREFIX + leaf.name, _at(params["head"], leaf)
        if not config.tied:
            yield _OUTPUT.name, _at(params["head"], _OUTPUT)


def _is_qkv(leaf: _Leaf) -> bool:
    return "qkv" in leaf.path


def _at(tree: Tree, leaf: _Leaf) -> Any:
    for name in leaf.path:
        tree = tree[name]
    return tree


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"


def _write_tensors(
    folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> None:
    """Writes one safetensors file and config.json to a folder, in place of earlier ones.

    Raises:
      OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    unfinished = folder / f".{_WEIGHTS_NAME}.unfinished"
    # `transformers` refuses files without this entry, which names the framework of the layout.
    save_file(whole, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / _WEIGHTS_NAME)
    (folder / _CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _weights_file(path: Path) -> Path:
    """The file to open for a path, which may be a folder."""
    candidates = [path / _WEIGHTS_NAME, path / _INDEX_NAME] if path.is_dir() else [path]
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
