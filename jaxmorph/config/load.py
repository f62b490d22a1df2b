"""Reads a configuration file and its overrides into a checked `Config`, and writes one back."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxmorph.config.overrides import Origin, apply_overrides
from jaxmorph.config.problems import find_problems, printable, show
from jaxmorph.config.schema import Config
from jaxmorph.config.sections import SHIPPED_MODELS, Run, short_factory_name
from jaxmorph.config.yaml_text import NotYamlError, format_yaml, parse_yaml
from jaxmorph.errors import UserError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads and checks a run's configuration.

    Some defaults depend on other values: `run.dir` is `runs/` and the file's name,
    `optimizer.warmup_steps` a tenth of `run.steps`, and `model.folder` and `data.folder`, for a
    factory that does not come with jaxmorph, the file's folder.

    Args:
        path: a YAML file, UTF-8.
        overrides: `section.key=value` each, the value read as YAML; a mapping replaces a section.

    Raises:
        UserError: one line with the file or override, the key, what was got and expected.
    """
    origin, folder = Origin.of(path, overrides), Path(path).parent
    tree = apply_overrides(read_sections(path), origin.overrides)
    tree = _with_derived_defaults(tree, Path(path).stem)
    tree = _with_folder("data", _with_model_folder(tree, folder, origin.path), folder)
    return _checked(tree, origin)


def read_config(path: str | Path) -> dict[str, Any]:
    """Reads a configuration file's sections for `check_config`, without checking them.

    The defaults that depend on the file's name are filled in.

    Raises:
        UserError: there is no such file, or it has no sections.
    """
    return _with_derived_defaults(read_sections(path), Path(path).stem)


def check_config(tree: Mapping[str, Any], name: str = "config") -> Config:
    """Checks a configuration given as nested mappings, as `load_config` checks a file's.

    Args:
        name: stands for the file's name in errors.

    Raises:
        UserError: one line with the key, what was got and what was expected.
    """
    return _checked(_with_derived_defaults(tree, Path(Run().dir).name), Origin(name, ()))


def override_config(config: Config, overrides: Sequence[str], path: str | Path) -> Config:
    """Applies overrides to a run's configuration, whose file was at `path`.

    Warm-up steps that were derived from `run.steps` are derived again if it is now below them.

    Raises:
        UserError: as `load_config`.
    """
    origin = Origin.of(path, overrides)
    tree = apply_overrides(config.model_dump(mode="json"), origin.overrides)
    run, optimizer = tree.get("run"), tree.get("optimizer")
    if isinstance(run, Mapping) and isinstance(optimizer, Mapping):
        steps, derived = run.get("steps"), config.run.steps // 10
        is_derived = optimizer.get("warmup_steps") == derived
        if is_derived and isinstance(steps, int) and 0 < steps < derived:
            tree["optimizer"] = {**optimizer, "warmup_steps": steps // 10}
    tree = _with_derived_defaults(tree, Path(path).stem)
    return _checked(_with_model_folder(tree, Path(path).parent, origin.path), origin)


def dump_config(config: Config) -> str:
    """Writes a configuration as YAML with every key; it loads back to an equal one."""
    return format_yaml(config.model_dump(mode="json"))


def _checked(tree: Mapping[str, Any], origin: Origin) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise origin.error(find_problems(Config, error, tree)) from error


def read_sections(path: str | Path) -> dict[str, Any]:
    """Reads a configuration file's sections as they stand there, without defaults.

    Raises:
        UserError: there is no such file, or it has no sections.
    """
    name = printable(str(path))
    try:
        tree = parse_yaml(_read_text(path, name))
    except NotYamlError as error:
        raise UserError(f"{name}: not YAML: {error}") from error
    if tree is None:
        raise UserError(f"{name}: the file is empty, expected sections such as 'run' and 'model'")
    if not isinstance(tree, Mapping):
        raise UserError(f"{name}: got {show(tree)}, expected sections such as 'run' and 'model'")
    return dict(tree)


def _read_text(path: str | Path, name: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        reason = "no such file"
    except IsADirectoryError:
        reason = "got a folder"
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x})"
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise UserError(f"{name}: {reason}, expected a YAML file") from None


def _with_derived_defaults(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Fills in the defaults that depend on the file's name and on other keys."""
    derived = _under(tree, "run", {"dir": f"runs/{name}", "steps": Run().steps})
    run = derived["run"]
    if isinstance(run, Mapping) and isinstance(run["steps"], int):
        derived = _under(derived, "optimizer", {"warmup_steps": max(run["steps"], 0) // 10})
    return derived


def _with_model_folder(tree: Mapping[str, Any], config_folder: Path, name: str) -> dict[str, Any]:
    """Names the folder of a user's own model, because ranks read the configuration elsewhere."""
    model = tree.get("model")
    factory = model.get("factory") if isinstance(model, Mapping) else None
    if not isinstance(factory, str) or short_factory_name(factory) not in SHIPPED_MODELS:
        return _with_folder("model", tree, config_folder)
    if "folder" not in tree["model"]:  # a saved configuration has the key
        _refuse_hidden_module(factory, (config_folder, Path.cwd()), name)
    return dict(tree)


def _with_folder(section: str, tree: Mapping[str, Any], config_folder: Path) -> dict[str, Any]:
    """Names the folder of the module that is a section's factory."""
    given = tree.get(section)
    factory = given.get("factory") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(factory, str):
        return dict(tree)
    folder, places = given.get("folder"), (config_folder, Path.cwd())
    if folder is None:
        # The folder of the module is recorded, since a resume may start in another directory.
        folder = next((each for each in places if _has_module(each, factory)), config_folder)
    elif not isinstance(folder, str) or not folder:
        return dict(tree)  # the checks refuse it
    return {**tree, section: {**given, "folder": str(Path(folder).resolve())}}


def _refuse_hidden_module(factory: str, places: Iterable[Path], name: str) -> None:
    """Refuses a shipped model's name where a user's own module has it too."""
    shipped = f"jaxmorph.models.{short_factory_name(factory)}"
    if factory == shipped:
        return
    models = Path(__file__).parents[1].joinpath("models").resolve()
    for folder in places:
        module = folder.joinpath(*factory.split("."))
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file() and not file.resolve().is_relative_to(models):
                raise UserError(
                    f"{name}: model.factory: got {factory!r}, which is also the name of {file}, "
                    f"expected {shipped}, or your module under another name"
                )


def _has_module(folder: Path, name: str) -> bool:
    top = folder / name.partition(".")[0]
    return top.is_dir() or top.with_suffix(".py").is_file()


def _under(tree: Mapping[str, Any], section: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with defaults for the keys that a section leaves out."""
    given = tree.get(section) or {}
    return {**tree, section: {**defaults, **given} if isinstance(given, Mapping) else given}
