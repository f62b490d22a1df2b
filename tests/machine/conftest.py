"""The library that stands for CUDA's driver lies beside the tests of copies."""

import sys
from pathlib import Path

COPIES = Path(__file__).parents[1] / "copies"

if str(COPIES) not in sys.path:
    sys.path.append(str(COPIES))
