"""A user's own batches: trees of arrays, checked and cut into microbatches."""

import inspect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxmorph.config import Config
from jaxmorph.data.batches import Batches
from jaxmorph.data.tokens import DataDigest
from jaxmorph.errors import UserError, in_users_code
from jaxmorph.stage.model import MicrobatchShapes, Tree
from jaxmorph.training.model_factory import load_factory

ROWS = "batch.microbatches times batch.microbatch_size"
_MOST_LENGTHS = 8
_PARTS = ("inputs", "targets", "extras")


def parts_of(batch: Sequence[Any]) -> tuple[Tree, Tree, Mapping[str, Tree]]:
    """A batch's inputs, targets and extras.

    Raises:
        UserError: It is not a sequence of two or three items.
    """
    try:
        inputs, targets, *extras = batch
        if len(extras) > 1:
            raise ValueError(batch)
    except (TypeError, ValueError) as error:
        got = type(batch).__name__
        raise UserError(
            f"batch: got {got}, expected a pair of tokens and targets, or inputs, targets and "
            "a dictionary of extras"
        ) from error
    return inputs, targets, extras[0] if extras else {}


def shapes_of(
    where: str, trees: tuple[Tree, Tree, Mapping[str, Tree]], num_examples: int, size: int
) -> MicrobatchShapes:
    """The shapes of one microbatch of a step's inputs, targets and extras.

    Args:
        where: What errors begin with.
        num_examples: The examples of a step: the first axis of every array.
        size: The examples of a microbatch.

    Raises:
        UserError: An array has another first axis, or inputs or targets have no array.
    """

    def shape(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        array = np.asarray(leaf)
        name = _name(path)
        if array.dtype == object:
            raise UserError(f"{where}: got {name} of {type(leaf).__name__}, expected arrays")
        if array.shape[:1] != (num_examples,):
            raise UserError(
                f"{where}: got {name} of shape {list(array.shape)}, expected [{num_examples}, "
                f"...]: {ROWS}"
            )
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        return jax.ShapeDtypeStruct((size, *array.shape[1:]), dtype)

    inputs, targets, extras = trees
    named = {"inputs": inputs, "targets": targets, "extras": extras}
    if not isinstance(extras, Mapping):
        got = type(extras).__name__
        raise UserError(f"{where}: got extras of {got}, expected a dictionary of arrays by name")
    for name in ("inputs", "targets"):
        if not jax.tree.leaves(named[name]):
            raise UserError(f"{where}: got {name} without arrays, expected at least one")
    found = jax.tree.map_with_path(shape, named)
    return MicrobatchShapes(found["inputs"], found["targets"], dict(found["extras"]))


def cut_tree(
    where: str, name: str, tree: Tree, expected: Tree, microbatches: int, rows: str = ROWS
) -> Tree:
    """A step's tree as arrays [microbatches, microbatch size, ...].

    Args:
        where: What errors begin with.
        name: Of the tree, in errors.
        expected: The shapes of one microbatch.
        rows: Why that shape is expected, in errors.

    Raises:
        UserError: The tree has another structure, or an array another shape or dtype.
    """
    got, wanted = jax.tree.structure(tree), jax.tree.structure(expected)
    if got != wanted:
        named = f"{got}".removeprefix("PyTreeDef"), f"{wanted}".removeprefix("PyTreeDef")
        raise UserError(f"{where}: got {name} as {named[0]}, expected {named[1]}")

    def cut(path: Any, leaf: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        array, full = np.asarray(leaf), f"{name}{jax.tree_util.keystr(path)}"
        if not _is_like(array.dtype, shape.dtype):
            wanted = "whole numbers" if shape.dtype.kind in "iu" else str(shape.dtype)
            raise UserError(f"{where}: got {full} of {array.dtype}, expected {wanted}")
        in_parts = (microbatches, *shape.shape)
        whole = (microbatches * shape.shape[0], *shape.shape[1:])
        if array.shape not in (whole, in_parts):
            got, expected = list(array.shape), list(whole)
            raise UserError(f"{where}: got {full} of shape {got}, expected {expected}: {rows}")
        cast = array.astype(shape.dtype, copy=False)
        if array.dtype != cast.dtype and shape.dtype.kind in "iu" and not np.all(cast == array):
            wrong = f"numbers beyond {shape.dtype}, such as {array[cast != array].flat[0]}"
            raise UserError(f"{where}: got {full} with {wrong}, expected the example's type")
        return cast.reshape(in_parts)

    return jax.tree.map_with_path(cut, tree, expected)


def _is_like(got: Any, expected: Any) -> bool:
    """Whether numbers of one type stand for those of the other: both whole, or both floats."""
    kinds = (jnp.integer, jnp.floating, jnp.bool_)
    return any(jnp.issubdtype(got, kind) and jnp.issubdtype(expected, kind) for kind in kinds)


def _is_same(one: Tree, other: Tree) -> bool:
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def _name(path: Any) -> str:
    root, *rest = path
    return f"{root.key}{jax.tree_util.keystr(tuple(rest))}"


class OwnBatches:
    """The batches of an object that `data.factory` made, cut into microbatches.

    The object may have `bucket(step)`, a whole number that grows with the length of the step's
    arrays. Steps of one number all have the shapes of the first of them; without `bucket`, all
    steps have the shapes of step 0.

    Args:
        name: Where the object comes from, in errors.
        like: The batches whose shapes these must have; None: these themselves.

    Raises:
        UserError: A batch of another structure, shape or dtype.
    """

    def __init__(
        self,
        config: Config,
        source: Any,
        name: str = "build_data",
        like: "OwnBatches | None" = None,
    ) -> None:
        self._source, self._sizes = source, config.batch
        self._where = f"data.factory: {config.data.factory}"
        if like is not None:
            self._where += f": {name}"
        self._num_steps, self._like = config.run.steps, self if like is None else like
        # A thread reads steps ahead while other threads read; held-out batches may share files.
        self._lock = threading.Lock() if like is None else like._lock
        lacking = [each for each in ("inputs", "targets") if not callable(getattr(source, each, 0))]
        if lacking:
            raise UserError(
                f"{self._where}: got {type(source).__name__} of {name} without "
                f"{' and '.join(lacking)}, expected an object with inputs(step) and targets(step)"
            )

    def inputs(self, step: int) -> Tree:
        """What the first stage reads."""
        return self._part("inputs", step)

    def targets(self, step: int) -> Tree:
        """What the last stage reads."""
        return self._part("targets", step)

    def extras(self, step: int) -> Mapping[str, Tree]:
        """What a stage reads if its functions take extras."""
        return self._part("extras", step)

    def length_index(self, step: int) -> int:
        """Which of `shapes.lengths` the step has."""
        bucket, known = self._bucket(step), list(self._like._buckets)
        if bucket not in known:
            some = ", ".join(map(str, known))
            raise UserError(f"{self._where}: bucket({step}): got {bucket}, expected one of {some}")
        return known.index(bucket)

    @cached_property
    def first_steps(self) -> tuple[int, ...]:
        """The first step of each length, the longest first."""
        return tuple(self._buckets.values())

    @cached_property
    def shapes(self) -> MicrobatchShapes:
        """The data of one microbatch."""
        if self._like is not self:
            return self._like.shapes
        longest, *shorter = map(self._shapes_of, self.first_steps)
        return replace(longest, shorter=tuple(shorter))

    @cached_property
    def _buckets(self) -> dict[int, int]:
        """The first step of each bucket of the run, the longest first."""
        found: dict[int, int] = {}
        for step in range(self._num_steps):
            found.setdefault(self._bucket(step), step)
            if len(found) > _MOST_LENGTHS:
                raise UserError(
                    f"{self._where}: bucket(step): got {len(found)} numbers in steps 0 to {step}, "
                    f"expected at most {_MOST_LENGTHS}: each has programs of its own"
                )
            if not hasattr(self._source, "bucket"):
                break
        return dict(sorted(found.items(), reverse=True))

    def _bucket(self, step: int) -> int:
        if not hasattr(self._source, "bucket"):
            return 0
        with self._lock, in_users_code(f"bucket({step})", self._source.bucket, self._where):
            bucket = self._source.bucket(step)
        if not isinstance(bucket, int | np.integer):
            got = type(bucket).__name__
            raise UserError(f"{self._where}: bucket({step}): got {got}, expected a whole number")
        return int(bucket)

    def _shapes_of(self, step: int) -> MicrobatchShapes:
        size = self._sizes.microbatch_size
        with in_users_code(f"step {step} of the data", otherwise=self._where):
            inputs, targets = self._read("inputs", step), self._read("targets", step)
            trees = inputs, targets, self._read("extras", step)
            again = [self._read(name, step) for name in _PARTS]
        for name, first, second in zip(_PARTS, trees, again, strict=True):
            if not _is_same(first, second):
                raise UserError(
                    f"{self._where}: step {step}: got other {name} when read twice, expected the "
                    "same: they must follow from the step's number alone"
                )
        num_examples = self._sizes.microbatches * size
        return shapes_of(f"{self._where}: step {step}", trees, num_examples, size)

    def _part(self, name: str, step: int) -> Tree:
        length_index = self.length_index(step)
        expected = getattr(self.shapes.lengths[length_index], name)
        where, first = f"{self._where}: step {step}", self._like.first_steps[length_index]
        tree, why = self._read(name, step), f"as in step {first}"
        return cut_tree(where, name, tree, expected, self._sizes.microbatches, why)

    def _read(self, name: str, step: int) -> Tree:
        if name == "extras" and not hasattr(self._source, name):
            return {}
        with self._lock:
            return getattr(self._source, name)(step)


StepData: TypeAlias = Batches | OwnBatches
"""The data of any step: trees of arrays [microbatches, microbatch size, ...].

They depend only on the step's number, which counts from 0, and are the same on every process.
"""


def load_own_data(config: Config) -> tuple[OwnBatches, OwnBatches | None, int, DataDigest]:
    """The batches of `data.factory`, the held-out ones, the vocabulary (0: none), and a digest.

    Raises:
        UserError: There is no such module, or it makes no batches.
    """
    data, batch = config.data, config.batch
    name = str(data.factory)
    module = load_factory(name, data.folder, "data.factory")
    with in_users_code("build_data", module.build_data, otherwise=f"data.factory: {name}"):
        source = module.build_data(
            batch_size=batch.microbatches * batch.microbatch_size,
            sequence_length=data.sequence_length,
            seed=config.run.seed,
            path=data.path,
        )
    batches, held_out = OwnBatches(config, source), getattr(source, "held_out", None)
    if config.evaluation.every_steps is None:
        held_out = None
    elif held_out is None:
        raise UserError(
            f"evaluation.every_steps: got {config.evaluation.every_steps}, expected null, or "
            f"`held_out` of the object that build_data of {name} returns"
        )
    else:
        held_out = OwnBatches(config, held_out, "held_out", like=batches)
        for step in range(config.evaluation.batches):
            held_out.length_index(step)  # raises for a length that training lacks
    digest = getattr(source, "digest", None) or inspect.getsource(module)
    hashed = blake2b(str(digest).encode(), digest_size=16).hexdigest()
    vocab_size = data.vocab_size or getattr(source, "vocab_size", 0)
    return batches, held_out, vocab_size, DataDigest(0, hashed)
