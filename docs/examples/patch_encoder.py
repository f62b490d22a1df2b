"""An encoder of images that says what they show, and images to train it on.

Train it from this folder with `jaxmorph train patch_encoder.yaml`. Inputs are floats, targets are
one class for each image, and a mask says which patches an image has: images differ in height. Steps
of low images have fewer patches, and compute as many.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]

PRESETS: Mapping[str, Mapping[str, int]] = {
    "tiny": {"width": 64, "num_layers": 4, "num_heads": 4},
    "small": {"width": 256, "num_layers": 8, "num_heads": 8},
}
NUM_CLASSES, SIDE, PATCH = 8, 16, 4
"""Directions of stripes; an image's width, and a patch's, in pixels."""
MOST_PATCHES = (SIDE // PATCH) ** 2


def build(
    *,
    preset: str,
    sequence_length: int,
    vocab_size: int,
    compute_dtype: str = "float32",
    **overrides: Any,
) -> "PatchEncoder":
    """Returns the model that a configuration asks for; `vocab_size` is the number of classes."""
    if preset not in PRESETS:
        raise ValueError(f"preset: got {preset!r}, expected one of {', '.join(PRESETS)}")
    sizes: dict[str, Any] = {**PRESETS[preset], **overrides}
    return PatchEncoder(vocab_size, sequence_length, dtype=jnp.dtype(compute_dtype), **sizes)


class PatchEncoder:
    """Every patch attends to all patches of its image; their mean gives the classes' scores."""

    tied = ()

    def __init__(
        self,
        num_classes: int,
        num_patches: int,
        width: int,
        num_layers: int,
        num_heads: int,
        dtype: jnp.dtype,
    ):
        if width % num_heads:
            raise ValueError(f"width: got {width}, expected a multiple of {num_heads} heads")
        self.num_layers = num_layers
        self._num_classes, self._num_patches = num_classes, num_patches
        self._width, self._num_heads, self._dtype = width, num_heads, dtype

    def init_embed(self, key: jax.Array) -> Params:
        """Returns the embedding's float32 parameters."""
        pixels, places = jax.random.split(key)
        return {
            "pixels": _normal(pixels, (PATCH * PATCH, self._width)),
            "places": _normal(places, (self._num_patches, self._width)),
        }

    def init_layer(self, key: jax.Array) -> Params:
        """Returns one layer's float32 parameters."""
        keys, width = jax.random.split(key, 4), self._width
        return {
            "qkv": _normal(keys[0], (width, 3 * width)),
            "mixed": _normal(keys[1], (width, width)),
            "expand": _normal(keys[2], (width, 4 * width)),
            "contract": _normal(keys[3], (4 * width, width)),
        }

    def init_head(self, key: jax.Array) -> Params:
        """Returns the head's float32 parameters."""
        return {"output": _normal(key, (self._width, self._num_classes))}

    def embed(self, params: Params, inputs: Mapping[str, jax.Array]) -> jax.Array:
        """Returns activations [microbatch, patch, width] of float32 [microbatch, patch, pixel]."""
        patches = inputs["patches"]
        x = patches @ params["pixels"] + params["places"][: patches.shape[1]]
        return x.astype(self._dtype)

    def layer(self, params: Params, x: jax.Array, *, extras: Mapping[str, jax.Array]) -> jax.Array:
        """Returns activations of the same shape and dtype."""
        weights = {name: leaf.astype(self._dtype) for name, leaf in params.items()}
        batch, patches, width = x.shape
        heads = (batch, patches, self._num_heads, width // self._num_heads)
        qkv = jnp.split(_normalised(x) @ weights["qkv"], 3, axis=-1)
        q, k, v = (part.reshape(heads) for part in qkv)
        is_patch = extras["is_patch"][:, None, None, :]
        mixed = jax.nn.dot_product_attention(q, k, v, mask=is_patch).reshape(x.shape)
        x = x + mixed @ weights["mixed"]
        return x + jax.nn.gelu(_normalised(x) @ weights["expand"]) @ weights["contract"]

    def head(
        self,
        params: Params,
        x: jax.Array,
        targets: jax.Array,
        *,
        extras: Mapping[str, jax.Array],
    ) -> jax.Array:
        """Returns the float32 sum of the images' losses; targets below 0 are left out."""
        is_patch = extras["is_patch"][..., None]
        found = jnp.where(is_patch, _normalised(x).astype(jnp.float32), 0).sum(1)
        scores = (found / is_patch.sum(1)) @ params["output"]
        is_target = targets[:, None] == jnp.arange(self._num_classes)
        losses = jax.nn.logsumexp(scores, -1) - jnp.where(is_target, scores, 0).sum(-1)
        return jnp.where(targets >= 0, losses, 0).sum()


def build_data(*, batch_size: int, sequence_length: int, seed: int, **_: Any) -> "StripedImages":
    """Returns the images that a configuration asks for, and others to evaluate on."""
    if sequence_length != MOST_PATCHES:
        raise ValueError(f"sequence_length: got {sequence_length}, expected {MOST_PATCHES} patches")
    images = StripedImages(batch_size, seed)
    images.held_out = StripedImages(batch_size, seed, of_training=False)
    return images


class StripedImages:
    """Noisy stripes of eight directions; each step's images follow from its number alone."""

    vocab_size = NUM_CLASSES
    digest = "striped images"  # else a run whose model, in this file too, is edited can't resume
    held_out: "StripedImages | None" = None

    def __init__(self, batch_size: int, seed: int, of_training: bool = True):
        self._batch_size, self._seed = batch_size, (seed, int(of_training))

    def bucket(self, step: int) -> int:
        """Returns the rows of patches of the highest images of a step: fewer in every third."""
        return SIDE // PATCH - (step % 3 == 2)

    def inputs(self, step: int) -> dict[str, np.ndarray]:
        """Returns the images' patches, float32 [batch, patch, pixel]."""
        random, shape = self._random(step, 1), (self._batch_size, 1, 1)
        angles = (np.pi / NUM_CLASSES * self.targets(step)).reshape(shape)
        down, right = np.mgrid[:SIDE, :SIDE]
        phases = random.uniform(0, 2 * np.pi, shape)
        stripes = np.sin(right * np.cos(angles) + down * np.sin(angles) + phases)
        images = stripes + random.normal(0, 0.5, stripes.shape)
        along = SIDE // PATCH
        patches = images.reshape(-1, along, PATCH, along, PATCH).swapaxes(2, 3)
        patches = patches.reshape(self._batch_size, MOST_PATCHES, PATCH * PATCH)
        # Nothing is where an image has no patch.
        is_patch = self.extras(step)["is_patch"][..., None]
        patches = patches[:, : is_patch.shape[1]]
        return {"patches": np.where(is_patch, patches, 0).astype(np.float32)}

    def targets(self, step: int) -> np.ndarray:
        """Returns the images' classes, int32 [batch]."""
        return self._random(step, 0).integers(NUM_CLASSES, size=self._batch_size, dtype=np.int32)

    def extras(self, step: int) -> dict[str, np.ndarray]:
        """Returns which patches the images have, bool [batch, patch]: those of 2 rows or more."""
        along, most = SIDE // PATCH, self.bucket(step)
        rows = self._random(step, 2).integers(2, most, size=self._batch_size, endpoint=True)
        return {"is_patch": np.arange(along * most) < along * rows[:, None]}

    def _random(self, step: int, what: int) -> np.random.Generator:
        return np.random.default_rng((*self._seed, step, what))


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return 0.05 * jax.random.normal(key, shape)


def _normalised(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)
