"""``jaxmorph init``: writes one of the configurations that come with jaxmorph."""

from pathlib import Path

from jaxmorph.errors import UserError

_STARTERS = Path(__file__).parent / "configs"  # links to the repository's, files in a wheel


def write_starter(folder: Path, name: str) -> Path:
    """Write a configuration to a new file in a folder, which is made if missing; returns its path.

    Raises:
        UserError: There is no such configuration, or the file exists or cannot be written.
    """
    names = sorted(path.stem for path in _STARTERS.glob("*.yaml"))
    if name not in names:
        raise UserError(f"--name: got {name!r}, expected one of {', '.join(names)}")
    path = folder / f"{name}.yaml"
    text = (_STARTERS / path.name).read_text(encoding="utf-8")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"DIR: got {folder}, expected a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(f"DIR: got {folder}, expected a folder without {path.name}") from error
    except OSError as error:
        raise UserError(f"DIR: {path}: cannot be written: {error.strerror}") from error
    return path
