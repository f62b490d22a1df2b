"""A device that runs programs when it is told to. (A CPU runs those with callbacks at once.)"""

import threading

import jax
import numpy as np
from fake_cuda import LIMIT_S


class LaterDevice:
    """Stands for the compilation of programs: what is compiled here is run by `run_next`.

    Args:
        compiling: Compiles a program that runs at once.
    """

    def __init__(self, compiling):
        self._compiling = compiling
        self._launches = []

    def compile(self, program):
        compiled = self._compiling(program)

        def launch(*operands):
            self._launches.append(_Launch(lambda: compiled(*operands)))
            return self._launches[-1].results(jax.eval_shape(program.traceable, *program.operands))

        return launch

    def run_next(self, error=None):
        """Run the first program that has not run, or have it fail."""
        self._launches.pop(0).run(error)


class _Launch:
    def __init__(self, work):
        self.over, self.error, self.given = threading.Event(), None, None
        self._work = work

    def run(self, error):
        self.error = error
        if error is None:
            self.given = self._work()
        self.over.set()

    def results(self, like):
        if isinstance(like, tuple):
            return tuple(_Result(self, index) for index in range(len(like)))
        return _Result(self)


class _Result:
    """Behaves like an array that is being computed."""

    def __init__(self, launch, index=None):
        self._launch, self._index = launch, index

    def is_ready(self):
        return self._launch.over.is_set()

    def block_until_ready(self):
        assert self._launch.over.wait(LIMIT_S)
        if self._launch.error is not None:
            raise self._launch.error
        return self

    def __array__(self, dtype=None, copy=None):
        self.block_until_ready()
        given = self._launch.given
        return np.asarray(given if self._index is None else given[self._index])
