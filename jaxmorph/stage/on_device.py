"""What a model takes of the device that it runs on, where it chooses; asked before it is traced."""

from typing import Protocol, TypeGuard

from jaxmorph.errors import UserError
from jaxmorph.stage.model import PipelineModel


class ChoosesByDevice(PipelineModel, Protocol):
    """A model that computes the same in one way or another, by what a device has."""

    def on_device(self, microbatch_size: int, sequence_length: int) -> str:
        """Returns what it takes of the default device, in a few words, or nothing.

        Raises:
          ValueError: it is to take what the device doesn't have; in one line.
        """
        ...


def taken_on_device(model: PipelineModel, microbatch_size: int, sequence_length: int) -> str:
    """Returns what a model takes of the default device, in a few words; empty if it has no choice.

    Raises:
      UserError: it is to take what the device doesn't have; in one line.
    """
    if not _chooses(model):
        return ""
    try:
        return model.on_device(microbatch_size, sequence_length)
    except ValueError as error:
        raise UserError(f"model.{error}") from error


def _chooses(model: PipelineModel) -> TypeGuard[ChoosesByDevice]:
    return hasattr(model, "on_device")
