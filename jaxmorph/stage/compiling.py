"""How this process comes from a lowered program to a compiled one: by XLA, unless it is told else.

It is asked for programs on one device alone, the costly ones: a stage's, its optimizer's.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jax.stages import Compiled, Lowered

Compile = Callable[[Lowered], Compiled]


def _by_xla(lowered: Lowered) -> Compiled:
    return lowered.compile()


@dataclass
class _Way:
    compile: Compile = _by_xla


_way = _Way()  # of the whole process, as JAX's own compilation cache is


def compiled(lowered: Lowered) -> Compiled:
    """The program, compiled now or before.

    Args:
        lowered: What to compile, for one device.
    """
    return _way.compile(lowered)


def compile_by(compile_: Compile | None) -> None:
    """Say how programs are compiled from now on.

    Args:
        compile_: Compiles one, or finds it; None: XLA does.
    """
    _way.compile = compile_ or _by_xla
