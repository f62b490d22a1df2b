"""What these tests share lies beside them, and a library that stands for the driver's elsewhere."""

import sys
from pathlib import Path

HERE = Path(__file__).parent

for folder in (HERE, HERE.parent / "copies"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
