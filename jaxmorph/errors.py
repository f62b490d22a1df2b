"""The errors that end a command with a message instead of a traceback."""


class UserError(Exception):
    """A mistake that the user can correct: exit code 2.

    The message is one line: where, what was got, what was expected.
    """


class RunStoppedError(Exception):
    """A run was asked to end and has saved its state before its last step: exit code 143.

    The message names the step and how to continue. The exit code is that of a process that SIGTERM
    has ended, so that a scheduler doesn't consider the run finished.
    """


class RunFailedError(Exception):
    """A valid run started and failed: exit code 1.

    Args:
        message: A few lines: what failed, why, and where to read more.
        asked_to_end: Whether the run had been asked to end before, as by SIGTERM.
    """

    def __init__(self, message: str, *, asked_to_end: bool = False) -> None:
        super().__init__(message)
        self.asked_to_end = asked_to_end
