"""Models, which know nothing of pipelines, stages or schedules."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .flax_modules import linen, nnx

__all__ = ["linen", "nnx"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import flax_modules  # imports Flax

    return getattr(flax_modules, name)
