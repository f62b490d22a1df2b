"""Builds the model that the configuration's `model` section names."""

import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmorph.config import Config
from jaxmorph.config.sections import SHIPPED_MODELS, Model, short_factory_name
from jaxmorph.errors import UserError, in_users_code, users_line

if TYPE_CHECKING:
    from jaxmorph.stage.model import PipelineModel

_NAMES_A_KEY = re.compile(r"\w+: ")


def build_model(config: Config, vocab_size: int) -> "PipelineModel":
    """Build the configuration's model.

    Raises:
        UserError: There is no such factory, or it refuses its options.
    """
    from jaxmorph.stage.model_checks import check_attributes

    build = load_factory(config.model.factory, config.model.folder).build
    with in_users_code("build"):
        try:
            model = build(
                preset=config.model.preset,
                sequence_length=config.data.sequence_length,
                compute_dtype=config.precision.compute,
                vocab_size=vocab_size,
                **config.model.options,
            )
        except (TypeError, ValueError) as error:
            text = str(error)
            if _NAMES_A_KEY.match(text):
                raise UserError(f"model.{text}") from error
            if users_line(error.__traceback__):
                raise
            raise UserError(f"model: {text}") from error  # such as one about an unknown key
    check_attributes(model)
    return model


def changeable_options(model: Model) -> tuple[str, ...]:
    """The keys of the `model` section that may change when a run resumes or a model is sampled.

    The factory lists them in `CHANGEABLE_OPTIONS`; they don't decide which model it is.
    """
    return tuple(getattr(load_factory(model.factory, model.folder), "CHANGEABLE_OPTIONS", ()))


def without_changeable_options(config: Config) -> Config:
    """The configuration without its changeable options."""
    left_out = changeable_options(config.model)
    kept = {key: value for key, value in config.model.model_dump().items() if key not in left_out}
    return config.model_copy(update={"model": type(config.model).model_validate(kept)})


def load_factory(name: str, folder: str | None = None, where: str = "model.factory") -> Any:
    """Import the module that makes a model, with `build`, or data, with `build_data`.

    Args:
        name: `gpt2` or `llama` for a model, or a module, looked for among the installed packages,
            then in `folder`, then in the current directory.
        where: Where the name comes from, for errors; `data.factory` makes data.

    Raises:
        UserError: There is no such module, or it has no such function.
    """
    makes_data = where == "data.factory"
    function, shipped = ("build_data", ()) if makes_data else ("build", SHIPPED_MODELS)
    short = short_factory_name(name)
    if short in shipped:
        return _import_shipped(short, where)
    here = str(Path.cwd())
    places = [here] if folder in (None, here) else [folder, here]
    _search_last(places)
    expected = (
        f"expected {''.join(f'{each}, ' for each in shipped)}{'or ' if shipped else ''}a module "
        f"with a function {function!r} among the installed packages or in {' or '.join(places)}"
    )
    with in_users_code(f"import of {name}", otherwise=where):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module exists, but something that it imports doesn't
            raise UserError(f"{where}: got {name!r}, {expected}") from error
    if not hasattr(module, function):
        raise UserError(f"{where}: got {name!r} without a function {function!r}, {expected}")
    return module


def _import_shipped(name: str, where: str) -> Any:
    try:
        return importlib.import_module(f"jaxmorph.models.{name}")
    except ModuleNotFoundError as error:
        if error.name != "jaxmorph.models":
            raise
        link = Path(__file__).parents[1] / "models"
        raise UserError(
            f"{where}: {link}: got a checkout without symbolic links, expected a link to ../models"
        ) from error


def _search_last(places: Sequence[str]) -> None:
    """Have Python search these folders, in this order, after all others."""
    # Ranks start by `python -m`, which searches the current directory first. So they could import
    # a different module of the same name than the command has checked.
    if sys.path[0] in ("", str(Path.cwd())):
        del sys.path[0]
    sys.path.extend(place for place in places if place not in sys.path)
