"""What these tests share lies beside them, and what stands for libcuda beside those of copies."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

HERE = Path(__file__).parent

for folder in (HERE, HERE.parent / "copies"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@pytest.fixture
def cuda_library():
    """Makes libraries that stand for libcuda."""
    return import_module("fake_cuda").FakeLibrary
