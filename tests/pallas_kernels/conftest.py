"""Where these tests find the modules beside them."""

import sys
from pathlib import Path

HERE = Path(__file__).parent

if str(HERE) not in sys.path:  # `ptx_machine`, `ptx_memory` and others lie beside these tests
    sys.path.append(str(HERE))
