"""What ranks have compiled, kept for those that are started in their place."""

from pathlib import Path

import jax

from jaxmorph.config import Config
from jaxmorph.runtime.kept_programs import KeptPrograms
from jaxmorph.stage.compiling import compile_by

FOLDER = "compilation_cache"


def keep_compiled(config: Config, directory: Path, rank: int) -> None:
    """Have this process keep what it compiles from now on, if its run may be started again.

    Its stage's programs it keeps itself (see `kept_programs`), and all else is JAX's to keep, in
    its persistent cache, which process 0 writes. One that is set already, as by
    JAX_COMPILATION_CACHE_DIR, stays.
    """
    wanted = config.restart_policy.compilation_cache
    if not config.may_restart or wanted is False:
        return
    folder = (directory / FOLDER if wanted is True else Path(wanted)).absolute()
    compile_by(KeptPrograms(folder / f"rank_{rank}").compile)
    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # What is left takes less than JAX's second each, and together more than a second.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
