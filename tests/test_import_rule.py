"""Who may import whom: read from the sources, imports inside functions included."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}
IMPORTS_JAX = {"grain"}  # other packages whose import imports JAX

# The packages in their order: each imports only those before it, not those in its own group.
ORDER = (
    ("errors", "output", "progress"), ("plain_json", "records"), ("messages", "placement"),
    ("config",), ("emulation", "data"), ("schedule",), ("program",), ("control",),
    ("stage", "transport", "pallas_kernels"), ("copies",), ("runtime",), ("checkpoints",),
    ("report",), ("training",), ("compare",), ("cli",),
)  # fmt: skip
ONLY = {  # packages that could be used without the rest
    "records": set(),
    "plain_json": set(),
    "messages": {"plain_json", "records"},
    "placement": {"records"},
    "data": {"errors"},
    "schedule": {"errors", "records", "placement"},
    "program": {"errors", "records", "placement", "schedule"},
    "progress": set(),
    "transport": {"errors", "emulation", "progress"},
    "stage": {"errors", "progress"},
    "pallas_kernels": set(),
    "copies": {"errors", "transport", "pallas_kernels"},
}
WITHOUT_JAX = {
    "errors", "output", "progress", "plain_json", "records", "messages", "placement", "config",
    "emulation", "data", "schedule", "program", "control", "transport", "report",
}  # fmt: skip
IN_FUNCTIONS_ALONE = {"data"}  # may import the packages that import JAX, but not on import


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _sources(package: str) -> dict[str, Path]:
    return {_module_name(path): path for path in sorted((ROOT / package).rglob("*.py"))}


def _absolute(node: ast.ImportFrom, path: Path) -> str:
    if not node.level:
        return node.module or ""
    package = path.relative_to(ROOT).parts[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def _imports(source: str, path: Path) -> set[str]:
    """Every module a source names in an import, at any depth, and what it takes from each."""
    return _named_in(ast.walk(ast.parse(source)), path)


def _imports_on_import(source: str, path: Path) -> set[str]:
    """Those of a source's imports that importing it runs: the ones outside functions."""
    return _named_in(_outside_functions(ast.parse(source)), path)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _outside_functions(child)


def _named_in(nodes: Iterable[ast.AST], path: Path) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, path)
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def _imports_by_module(package: str, read=_imports) -> dict[str, set[str]]:
    sources = _sources(package).items()
    return {name: read(path.read_text(encoding="utf-8"), path) for name, path in sources}


IMPORTS = _imports_by_module("jaxmorph")
IMPORTS_ON_IMPORT = _imports_by_module("jaxmorph", _imports_on_import)


def _package(module: str) -> str | None:
    """``jaxmorph.schedule.ops`` is of the package ``schedule``; jaxmorph itself is of none."""
    parts = module.split(".")
    return parts[1] if parts[0] == "jaxmorph" and len(parts) > 1 else None


def _packages_seen(module: str) -> set[str]:
    packages = {_package(name) for name in IMPORTS[module] if name.split(".")[0] == "jaxmorph"}
    return {package for package in packages if package} - {_package(module)}


def _top_levels(names: Iterable[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def test_packages_without_jax_never_name_it():
    for module in (m for m in IMPORTS if _package(m) in WITHOUT_JAX):
        in_functions = _package(module) in IN_FUNCTIONS_ALONE
        refused = JAX if in_functions else JAX | IMPORTS_JAX
        assert not _top_levels(IMPORTS[module]) & refused, module
        assert not _top_levels(IMPORTS_ON_IMPORT[module]) & IMPORTS_JAX, module


def test_packages_import_only_packages_before_them():
    rank = {package: number for number, packages in enumerate(ORDER) for package in packages}
    for module in (m for m in IMPORTS if _package(m) not in (None, "__main__")):
        package = str(_package(module))
        seen = _packages_seen(module)
        assert all(rank[other] < rank[package] for other in seen), (module, seen)
        assert seen <= ONLY.get(package, seen), (module, seen)


def test_models_know_nothing_of_the_pipeline():
    for path in (ROOT / "models").rglob("*.py"):
        installed = ROOT / "jaxmorph" / path.relative_to(ROOT)
        names = _imports(path.read_text(encoding="utf-8"), installed)
        of_jaxmorph = {name for name in names if name.split(".")[0] == "jaxmorph"}
        assert {_package(name) for name in of_jaxmorph} <= {"models"}, path


def test_there_are_no_import_cycles():
    graph = {
        module: {name for name in names if name in IMPORTS and name != module}
        for module, names in IMPORTS.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(reversed(error.args[1]))}")


def test_importing_the_command_line_or_the_data_package_does_not_import_jax():
    code = (
        "import sys, jaxmorph, jaxmorph.cli.app, jaxmorph.report; "
        "from jaxmorph.data import load_tokens; load_tokens(None); "
        "jaxmorph.plan, jaxmorph.simulate, jaxmorph.load_config; sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
