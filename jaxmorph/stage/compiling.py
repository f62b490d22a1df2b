"""Compiles this process's costly programs: those of its stage and of its optimizer.

XLA compiles them unless `compile_by` sets another function; runs set one that looks programs up in
a cache on disk (`runtime/kept_programs.py`).
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from jax.stages import Compiled, Lowered

Made = TypeVar("Made")
Compile = Callable[[Lowered], Compiled]


def _by_xla(lowered: Lowered) -> Compiled:
    return lowered.compile()


_compile: Compile = _by_xla  # one for the whole process, like JAX's own compilation cache


def compiled(lowered: Lowered) -> Compiled:
    """Compiles a program for one device, or finds it compiled."""
    return _compile(lowered)


def in_background(work: Callable[[], Made], name: str) -> "Future[Made]":
    """Starts work, such as a compilation, beside the process's other work.

    It uses a daemon thread, not an executor: a process that ends must not wait for the compiler.
    """
    made: Future[Made] = Future()

    def run() -> None:
        try:
            made.set_result(work())
        except Exception as error:  # raised where the result is needed
            made.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return made


def compile_by(compile_: Compile | None) -> None:
    """Sets the function that compiles programs from now on; None restores XLA."""
    global _compile
    _compile = compile_ or _by_xla
