"""From the configuration's `model` section to a model that can be pipelined."""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmorph.config import Config
from jaxmorph.errors import UserError

if TYPE_CHECKING:
    from jaxmorph.stage.model import PipelineModel

_NAMES_A_KEY = re.compile(r"\w+: ")


def build_model(config: Config, vocab_size: int) -> "PipelineModel":
    """The model that a configuration names.

    The factory is a module with a function `build`; it is looked for among the installed packages
    and in the current directory.

    Args:
        config: The run.
        vocab_size: The data's.

    Returns:
        What the factory built.

    Raises:
        UserError: If there is no such factory, or it refuses its options.
    """
    build = _factory(config.model.factory)
    options = {**config.model.options, "vocab_size": vocab_size}
    try:
        return build(
            preset=config.model.preset,
            sequence_length=config.data.sequence_length,
            compute_dtype=config.precision.compute,
            **options,
        )
    except (TypeError, ValueError) as error:
        text = str(error)
        key = "model." if _NAMES_A_KEY.match(text) else "model: "
        raise UserError(f"{key}{text}") from error


def _factory(name: str) -> Callable[..., Any]:
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` would have it, for models that are not installed
        sys.path.append(here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise UserError(
            f"model.factory: got {name!r}, expected a module that Python can import"
        ) from error
    if not hasattr(module, "build"):
        raise UserError(f"model.factory: got {name!r}, expected a module with a function 'build'")
    return module.build
