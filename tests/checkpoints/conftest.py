"""Lets these tests import the modules beside them that several of them share."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
