"""Writes the parameters that every contender starts from, for those that have no JAX.

`python -m benchmarks.training_speed.write_params FILE.npz WORKLOAD`
"""

import sys
from pathlib import Path

import jax
import numpy as np

from benchmarks.training_speed.plain_jax import initial_params
from benchmarks.training_speed.workload import Workload


def main(path: Path, workload: Workload) -> None:
    """Write each leaf under its path, such as `layers/attention/qkv/kernel`."""
    leaves = jax.tree.leaves_with_path(initial_params(workload))
    named = {"/".join(key.key for key in keys): np.asarray(leaf) for keys, leaf in leaves}
    np.savez(path, allow_pickle=False, **named)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Workload.from_text(sys.argv[2]))
