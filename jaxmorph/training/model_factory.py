"""From the configuration's `model` section to a model that can be pipelined."""

import importlib
import re
import sys
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

    Raises:
        UserError: If there is no such factory, or it refuses its options.
    """
    build = load_factory(config.model.factory).build
    try:
        return build(
            preset=config.model.preset,
            sequence_length=config.data.sequence_length,
            compute_dtype=config.precision.compute,
            vocab_size=vocab_size,
            **config.model.options,
        )
    except (TypeError, ValueError) as error:
        text = str(error)
        key = "model." if _NAMES_A_KEY.match(text) else "model: "
        raise UserError(f"{key}{text}") from error


def device_options(factory: str) -> tuple[str, ...]:
    """The keys of the `model` section that say how to compute, and nothing of which model it is.

    What was trained with one value of theirs may go on, or be sampled, with another.

    Args:
        factory: The model's module; in its `DEVICE_OPTIONS` they stand.
    """
    return tuple(getattr(load_factory(factory), "DEVICE_OPTIONS", ()))


def for_any_device(config: Config) -> Config:
    """The configuration without what it says of its device."""
    left_out = device_options(config.model.factory)
    kept = {key: value for key, value in config.model.model_dump().items() if key not in left_out}
    return config.model_copy(update={"model": type(config.model).model_validate(kept)})


def load_factory(name: str, where: str = "model.factory") -> Any:
    """The module that makes a model.

    Args:
        name: As Python imports it; the current directory is searched too.
        where: What an error says the name was read from.

    Raises:
        UserError: If there is no such module, or it has no such function.
    """
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` would have it, for models that are not installed
        sys.path.append(here)
    expected = "expected a module that Python can import, with a function 'build'"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, but not something that it needs
        raise UserError(f"{where}: got {name!r}, {expected}") from error
    if not hasattr(module, "build"):
        raise UserError(f"{where}: got {name!r} without one, {expected}")
    return module
