"""JAX's persistent compilation cache, for runs whose ranks may be started again.

JAX (0.10.2 and 0.12) writes it from process 0 of a run alone, wherever it is: the others read what
has been written for the same devices, which for a stage of their own is nothing. So of ranks that
are started again the first finds its programs compiled.
"""

from pathlib import Path

import jax

from jaxmorph.config import Config

FOLDER = "compilation_cache"


def keep_compiled(config: Config, directory: Path) -> None:
    """Have JAX keep what it compiles from now on, if this run may be started again.

    A cache that is set already, as by JAX_COMPILATION_CACHE_DIR, stays.

    Args:
        config: The run.
        directory: The run's.
    """
    wanted = config.restart_policy.compilation_cache
    if not config.may_restart or wanted is False or jax.config.jax_compilation_cache_dir:
        return
    folder = directory / FOLDER if wanted is True else Path(wanted)
    jax.config.update("jax_compilation_cache_dir", str(folder.absolute()))
    # A stage's programs take less than JAX's second each, and together more than all else.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
