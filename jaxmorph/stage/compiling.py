"""Compiles this process's costly programs: those of its stage and of its optimizer.

XLA compiles them unless `compile_by` sets another function; a run that may restart sets one that
looks programs up in a cache on disk (`runtime/kept_programs.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from jax.stages import Compiled, Lowered

Compile = Callable[[Lowered], Compiled]


def _by_xla(lowered: Lowered) -> Compiled:
    return lowered.compile()


@dataclass
class _Compiler:
    compile: Compile = _by_xla


_compiler = _Compiler()  # one for the whole process, like JAX's own compilation cache


def compiled(lowered: Lowered) -> Compiled:
    """Compiles a program for one device, or finds it compiled."""
    return _compiler.compile(lowered)


def compile_by(compile_: Compile | None) -> None:
    """Sets the function that compiles programs from now on; None restores XLA."""
    _compiler.compile = compile_ or _by_xla
