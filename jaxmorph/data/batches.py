"""The batch of each step: shuffled windows of the tokens, the same on every process.

Grain shuffles and reads ahead. It is imported inside functions because it imports JAX, which a
process that only checks its data does not need.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from jaxmorph.data.tokens import Tokens, check_ids
from jaxmorph.errors import UserError

_STEPS_AHEAD = 2

T = TypeVar("T")


class Batches:
    """Random access to the batch of any step.

    A step's batch follows from its number and the seed alone, so a run that resumes restores no
    state of its data. The tokens are cut into windows of `sequence_length + 1` that overlap by one
    token, so that an epoch predicts every token once. Each epoch visits the windows in another
    order; a batch may span two epochs.

    Args:
        seed: of the shuffling, 0 to 2**32 - 1.
        separator: the token that ends a document. A window is then packed documents, each computed
            as if it stood alone. None: a window is one text, whatever it holds.

    Raises:
        UserError: there are fewer tokens than one batch needs.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        microbatches: int,
        microbatch_size: int,
        sequence_length: int,
        seed: int,
        separator: int | None = None,
    ):
        import grain

        self._shape = (microbatches, microbatch_size, sequence_length)
        self._tokens, self._separator = tokens, separator
        _check_length(tokens, self._shape)
        windows = grain.MapDataset.source(_Windows(tokens.ids, sequence_length))
        self._windows = windows.shuffle(seed=seed).repeat().batch(microbatches * microbatch_size)

    def inputs(self, step: int) -> Any:
        """The first stage's inputs: int32 [microbatches, microbatch_size, sequence_length].

        Steps count from 0. Inputs of packed documents are {"tokens", "positions"}.

        Raises:
            UserError: a token is not in the vocabulary.
        """
        ids = self._ids(step)
        tokens = self._part(ids[:, :-1])
        if self._separator is None:
            return tokens
        positions = pack(ids, self._separator).positions
        return {"tokens": tokens, "positions": self._part(positions)}

    def targets(self, step: int) -> np.ndarray:
        """The last stage's targets, the token after each input; see `inputs`."""
        ids = self._ids(step)
        after = ids[:, 1:] if self._separator is None else pack(ids, self._separator).targets
        return self._part(after)

    def extras(self, step: int) -> Mapping[str, np.ndarray]:
        """What every layer may read: of packed documents {"segments"}, else nothing."""
        if self._separator is None:
            return {}
        return {"segments": self._part(pack(self._ids(step), self._separator).segments)}

    def length_index(self, step: int) -> int:
        """All steps have one length."""
        del step
        return 0

    def _ids(self, step: int) -> np.ndarray:
        ids = np.asarray(self._windows[step])
        check_ids(ids, self._tokens.vocab_size, self._tokens.source)
        return ids

    def _part(self, ids: np.ndarray) -> np.ndarray:
        return ids.astype(np.int32).reshape(self._shape)


@contextmanager
def read_ahead(read: Callable[[int], T], first_step: int = 0) -> Iterator[Iterator[T]]:
    """Reads steps in order on a thread, a few steps ahead of their use.

    Args:
        read: returns a step's data, such as `Batches.inputs`; `next` raises its errors.
    """
    import grain

    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_STEPS_AHEAD)
    steps = iter(grain.MapDataset.source(_Steps(read)).to_iter_dataset(options))
    with closing(steps):
        steps.set_state({"next_index": first_step})
        steps.start_prefetch()
        yield steps


class Packed(NamedTuple):
    """Windows as documents, each array [windows, sequence_length] of integers.

    Attributes:
        segments: the number of the document that holds an input, from 0 in each window.
        positions: the number of inputs before it in that document and window.
        targets: the token after each input; -1 for a separator, which ends its document.
    """

    segments: np.ndarray
    positions: np.ndarray
    targets: np.ndarray


def pack(ids: np.ndarray, separator: int) -> Packed:
    """Cuts each window [windows, sequence_length + 1] into the documents that separators end."""
    inputs = ids[:, :-1]
    ends = inputs == separator
    begins = np.concatenate([np.ones_like(ends[:, :1]), ends[:, :-1]], 1)
    at = np.arange(inputs.shape[1])
    return Packed(
        segments=np.cumsum(begins, 1) - 1,
        positions=at - np.maximum.accumulate(np.where(begins, at, 0), 1),
        targets=np.where(ends, -1, ids[:, 1:].astype(np.int64)),
    )


class _Windows:
    """Windows of the tokens: a window's last target is the first input of the next one."""

    def __init__(self, ids: np.ndarray, sequence_length: int):
        self._ids = ids
        self._sequence_length = sequence_length

    def __len__(self) -> int:
        return (self._ids.size - 1) // self._sequence_length

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self._sequence_length
        return self._ids[start : start + self._sequence_length + 1]


class _Steps(Generic[T]):
    """A function of the step as an endless sequence."""

    def __init__(self, read: Callable[[int], T]):
        self._read = read

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> T:
        return self._read(index)


def _check_length(tokens: Tokens, shape: tuple[int, int, int]) -> None:
    microbatches, microbatch_size, sequence_length = shape
    needed = microbatches * microbatch_size * sequence_length + 1
    if tokens.ids.size < needed:
        raise UserError(
            f"data.path: {tokens.source}: got {tokens.ids.size:,} tokens, expected at least "
            f"{needed:,} for one step ({microbatches} microbatches of {microbatch_size} sequences "
            f"of {sequence_length} tokens, plus one for the last target)"
        )
