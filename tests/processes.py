"""What the kernel says of processes, for tests that start some."""

from pathlib import Path


def is_running(pid):
    """Whether a process is there, and not only waits for its end to be heard of."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid):
    """The processes that a process has started, whichever of its threads did."""
    every = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            every |= {int(word) for word in task.read_text().split()}
        except OSError:  # the thread has ended, or all of it
            continue
    return sorted(every)
