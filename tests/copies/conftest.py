"""What these tests share lies beside them."""

import sys
from pathlib import Path

HERE = Path(__file__).parent

if str(HERE) not in sys.path:
    sys.path.append(str(HERE))
