"""The command `python -m jaxmorph.gpu_check`."""

import sys

from jaxmorph.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main())
