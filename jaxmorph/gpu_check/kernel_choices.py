"""XLA's choices of kernels, which it finds by timing, are found once for all of a check."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import jax

_FOLDER, _LEAST_S = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
_NO_PROGRAM_S = 1e9  # none takes that long to compile, so none is kept


@contextmanager
def sharing_kernel_choices(device: Any) -> Iterator[None]:
    """Have this process, and those that it starts, keep such choices in a folder while this lasts.

    A bfloat16 product may take XLA seconds of trying kernels on a GPU, and most parts have the same
    ones. Compiled programs are not kept: each part compiles its own. A cache that the user has
    named stays, with all that it keeps.

    Args:
        device: Where the check computes; a CPU has no such choices.
    """
    if device.platform == "cpu" or jax.config.values[_FOLDER]:
        yield
        return
    before_s = jax.config.values[_LEAST_S]
    with TemporaryDirectory(prefix="jaxmorph-", ignore_cleanup_errors=True) as folder:
        told = {_FOLDER.upper(): folder, _LEAST_S.upper(): f"{_NO_PROGRAM_S:g}"}
        before = {name: os.environ.pop(name) for name in told if name in os.environ}
        _use(folder, _NO_PROGRAM_S)
        os.environ.update(told)
        try:
            yield
        finally:
            _use(None, before_s)
            for name in told:
                del os.environ[name]
            os.environ.update(before)


def _use(folder: str | None, least_s: float) -> None:
    jax.config.update(_FOLDER, folder)
    jax.config.update(_LEAST_S, least_s)
