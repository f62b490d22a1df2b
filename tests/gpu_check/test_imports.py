"""The check and all that it imports have no further dependency, not even one that Flax has."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = {"jaxmorph", "models"}
ON_CALL = "models.gpt2.stages"  # what `models.gpt2` imports once a model is built


def source_of(module):
    path = ROOT.joinpath(*module.split("."))
    found = (path / "__init__.py", path.with_suffix(".py"))
    return next((candidate for candidate in found if candidate.is_file()), None)


def named_by(source):
    """The modules in a source's imports, with the packages that they are in; not in functions."""
    names = set()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.rsplit(".", depth)[0] for name in names for depth in range(name.count(".") + 1)}


def test_the_check_needs_jax_flax_optax_and_numpy_alone():
    package = ROOT / "jaxmorph" / "gpu_check"
    waiting = {f"jaxmorph.gpu_check.{path.stem}" for path in package.glob("*.py")} | {ON_CALL}
    seen, foreign = set(), {}
    while waiting:
        module = waiting.pop()
        seen.add(module)
        source = source_of(module)
        for name in named_by(source) if source else ():  # else a name in a module
            top = name.partition(".")[0]
            if top in OWN:
                waiting |= {name} - seen
            elif top not in sys.stdlib_module_names:
                foreign.setdefault(top, set()).add(module)
    assert "jaxmorph.runtime.executor" in seen
    assert foreign.keys() <= {"jax", "numpy", "flax", "optax"}, foreign
