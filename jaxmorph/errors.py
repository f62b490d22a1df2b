"""The errors that end a command with a message instead of a traceback."""


class UserError(Exception):
    """A mistake that the user can correct: exit code 2.

    The message is one line: where, what was got, what was expected.
    """


class RunStoppedError(Exception):
    """A run was asked to end and has saved its state before its last step.

    The message names the step and how to continue.

    Args:
        exit_code: That of a process that SIGTERM has ended, 143, or Ctrl-C, 130, so that a
            scheduler doesn't consider the run finished.
    """

    def __init__(self, message: str, exit_code: int = 143) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RunFailedError(Exception):
    """A valid run started and failed: exit code 1.

    Args:
        message: A few lines: what failed, why, and where to read more.
        asked_to_end: Whether the run had been asked to end before, as by SIGTERM.
    """

    def __init__(self, message: str, *, asked_to_end: bool = False) -> None:
        super().__init__(message)
        self.asked_to_end = asked_to_end


def quoted(value: object) -> str:
    """A value in one line of at most 60 characters, for a message."""
    line = repr(value)
    return line if len(line) <= 60 else f"{line[:57]}..."
