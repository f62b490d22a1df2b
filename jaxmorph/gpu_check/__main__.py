"""The command `python -m jaxmorph.gpu_check`."""

import faulthandler
import os
import sys

# JAX would take three quarters of a GPU's memory at its start, where two processes and the driver
# are to have some too. It looks when it is imported, or later: so it is told before that.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from jaxmorph.gpu_check.command import main

if __name__ == "__main__":
    faulthandler.enable()  # what a driver or a library dies of is said, too
    sys.exit(main())
