"""The reference on one device, computed by rank 0 and sent to the others."""

import base64
import pickle

import jax
import numpy as np
from one_device import OneDevice, optax_steps


class SharedReference:
    """The results of `OneDevice` on every rank; all ranks make the same calls in the same order."""

    def __init__(self, model, seed, rendezvous):
        self._rendezvous = rendezvous
        self._one_device = OneDevice(model, seed) if rendezvous.rank == 0 else None
        self._initial = {}

    def initial_loss_and_gradients(self, tokens, targets, random_step=None):
        """Those of the initial parameters; each batch is computed only once."""
        batch = (tokens.tobytes(), targets.tobytes(), random_step)
        if batch not in self._initial:
            self._initial[batch] = self._share(
                lambda one_device: one_device.loss_and_gradients(tokens, targets, random_step)
            )
        return self._initial[batch]

    def steps(self, settings, clip_norm, batches):
        """Parameters after Optax's steps."""
        return self._share(lambda one: optax_steps(one, settings, clip_norm, batches))

    def _share(self, compute):
        mine = {}
        if self._one_device is not None:
            found = jax.tree.map(np.asarray, compute(self._one_device))
            mine = {"pickled": base64.b64encode(pickle.dumps(found)).decode()}
        return pickle.loads(base64.b64decode(self._rendezvous.exchange(mine)[0]["pickled"]))


def norm(gradients):
    """The global norm; only the embedding has a tied parameter's gradient."""
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradients))))
