"""The errors that are the user's to mend, told apart from the program's own."""


class UserError(Exception):
    """A mistake the user can correct: one clear line, exit code 2, never a traceback.

    The message names what was got, what was expected and where.
    """


class RunStoppedError(Exception):
    """A run that was asked to end has saved its state and ended before its last step.

    The message says after which step, and how to go on. The exit code, 143, is that of a process
    that SIGTERM has ended, so that a scheduler doesn't take the run for done.
    """


class RunFailedError(Exception):
    """A run that was sound began and could not be finished: exit code 1.

    Args:
        message: In a few lines what failed, why, and where to read more.
        asked_to_end: Whether the run had been asked to end by then, as by SIGTERM.
    """

    def __init__(self, message: str, *, asked_to_end: bool = False) -> None:
        super().__init__(message)
        self.asked_to_end = asked_to_end
