"""What the kernel says of processes, for tests that start some."""

from benchmarks.leftovers import children, state

__all__ = ["children", "is_running"]


def is_running(pid):
    """Whether a process is there, and not only waits for its end to be heard of."""
    return state(pid) not in ("", "Z")
