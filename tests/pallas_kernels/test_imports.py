"""Who knows Mosaic: one module, and not before it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxmorph.pallas_kernels

pytestmark = pytest.mark.one_jax

ROOM = Path(jaxmorph.pallas_kernels.__file__).parent
SHIM = "mosaic.py"
NOT_PUBLIC = ("jax._src", "jaxlib", "jax.interpreters", "jax.experimental.mosaic")
MOSAIC = (*NOT_PUBLIC, "jax.experimental.pallas.mosaic_gpu")


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _named(path, packages):
    return {
        name for name in _imports(path) if f"{name}.".startswith(tuple(f"{p}." for p in packages))
    }


def test_no_module_but_the_shim_imports_mosaic_or_what_jax_keeps_private():
    naming = {path.name for path in ROOM.rglob("*.py") if _named(path, MOSAIC)}
    assert naming == {SHIM}


def test_the_shim_itself_takes_nothing_from_jaxs_private_package():
    assert not _named(ROOM / SHIM, ["jax._src"])


def test_importing_the_room_imports_no_pallas():
    code = (
        "import sys, jaxmorph.pallas_kernels; "
        "sys.exit(any(name.startswith('jax.experimental.pallas') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOM.parents[1])


def test_copies_on_a_cpu_import_no_pallas():
    code = (
        "import sys, jax\n"
        "from jax.sharding import SingleDeviceSharding\n"
        "from jaxmorph.copies.stage_copies import open_copies\n"
        "copies = open_copies(SingleDeviceSharding(jax.devices('cpu')[0]), lambda keeper: None)\n"
        "print(copies.outgoing.name, copies.incoming.name)\n"
        "copies.close()\n"
        "sys.exit(any(name.startswith('jax.experimental.pallas') for name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOM.parents[1], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "buffer_callback host\n"), done.stderr


def test_without_mosaic_the_error_names_what_is_missing():
    code = (
        "import sys, jax.numpy as jnp\n"
        "from jaxmorph.pallas_kernels import copy_to_host, new_arrivals\n"
        "sys.modules['jax.experimental.pallas.mosaic_gpu'] = None\n"
        "try:\n"
        "    copy_to_host(jnp.zeros(4), jnp.zeros(8, jnp.uint32), new_arrivals(), slot_bytes=16)\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOM.parents[1], capture_output=True, text=True
    )
    assert "the copy kernels need Pallas's Mosaic GPU backend, and with JAX" in done.stdout
    assert done.stderr == ""
