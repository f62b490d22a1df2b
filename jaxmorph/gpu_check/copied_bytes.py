"""Whether bytes that were copied are those that were to be copied, and which are not."""

import numpy as np

_END = 4096
_EVERY = 4093


def what_is_wrong(got: np.ndarray, expected: np.ndarray) -> str:
    """What is wrong with a payload now; empty if nothing is.

    Its end, and bytes here and there, are read before all the rest, which takes long enough for a
    copy that goes on to finish.

    Args:
        got: uint8 [n], memory that may be changing.
        expected: uint8 [n].
    """
    first_looks = {
        "of the last bytes": (got[-_END:].copy(), expected[-_END:]),
        f"of one byte in {_EVERY}": (got[::_EVERY].copy(), expected[::_EVERY]),
        "of all bytes": (got.copy(), expected),
    }
    for which, (seen, due) in first_looks.items():
        (wrong,) = np.nonzero(seen != due)
        if len(wrong):
            return f"{len(wrong)} {which} ({len(due)}), the first at {wrong[0]} among them"
    return ""


def spoil(memory: np.ndarray, expected: np.ndarray) -> None:
    """Fill memory with what is wrong in every byte.

    Args:
        memory: uint8 [n].
        expected: uint8 [n].
    """
    np.invert(expected, out=memory)
