"""Runs a module where nothing third-party is to be had but JAX, Flax, Optax and what these need."""

import runpy
import sys
from importlib.metadata import packages_distributions

HAD = {
    "jax", "jaxlib", "flax", "flaxlib", "optax", "numpy",
    # What they import themselves.
    "absl", "ml_dtypes", "msgpack", "opt_einsum", "scipy", "treescope", "typing_extensions",
    # What Flax imports to describe models.
    "rich", "pygments", "yaml",
    "jaxmorph", "models",
}  # fmt: skip


class Absent:
    """Finds nothing, loudly, in place of any other package."""

    def __init__(self):
        self._absent = packages_distributions().keys() - HAD

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self._absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, Absent())
    _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
