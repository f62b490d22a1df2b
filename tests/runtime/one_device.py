"""The reference: the same model on one device, by `jax.grad` and Optax."""

import inspect
from copy import copy
from functools import partial
from importlib.metadata import version

import jax
import numpy as np
import optax

from jaxmorph.runtime.optimizer import OptimizerSettings

# A reference runs a few times: it is compiled quickly, also where stages are as in users' runs.
QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if version("jaxlib").startswith("0.10."):  # later versions have no older emitters
    QUICKLY["xla_cpu_use_fusion_emitters"] = False
jit = partial(jax.jit, compiler_options=QUICKLY)


def initial_params(model, seed):
    """All stages' parameters as one tree, made independently of the stages' code."""

    @jit
    def keys():
        key = jax.random.key(seed)
        embed_key, layers_key, head_key = (jax.random.fold_in(key, part) for part in range(3))
        layers = [jax.random.fold_in(layers_key, layer) for layer in range(model.num_layers)]
        return embed_key, layers, head_key

    embed_key, layer_keys, head_key = keys()
    layers = list(map(jit(model.init_layer), layer_keys))
    params = {
        "embed": jit(model.init_embed)(embed_key),
        "layers": jax.tree.map(lambda *leaves: np.stack(leaves), *layers),
        "head": jit(model.init_head)(head_key),
    }
    return jax.device_put(untie(model, params))


def untie(model, params):
    """Replace the head's copies by the embedding's parameters."""
    for (embed_name,), (head_name,) in model.tied:
        head = {**params["head"], head_name: params["embed"][embed_name]}
        params = {**params, "head": head}
    return params


def data_of(model, tokens, targets):
    """The inputs, targets and extras that a model makes of tokens, where it takes others."""
    return (
        getattr(model, "inputs_of", lambda tokens: tokens)(tokens),
        getattr(model, "targets_of", lambda targets: targets)(targets),
        getattr(model, "extras_of", lambda tokens: {})(tokens),
    )


def loss_sum(model, params, tokens, targets, key=None, aux_scale=0.0):
    """The loss of one microbatch; `key` is the microbatch's."""
    inputs, targets, extras = data_of(model, tokens, targets)

    def given(function, key):
        names = inspect.signature(function).parameters
        by_name = {"key": key, "extras": extras}
        return partial(function, **{name: by_name[name] for name in by_name if name in names})

    aux_weights = getattr(model, "aux_weights", {})
    params = untie(model, params)  # so that the tied parameter's gradient is the sum of both uses
    fold_in = lambda key, number: None if key is None else jax.random.fold_in(key, number)  # noqa: E731
    x = given(model.embed, fold_in(key, 0))(params["embed"], inputs)
    layers_key = fold_in(key, 1)

    def one_layer(x, xs):
        number, layer = xs
        result = given(model.layer, fold_in(layers_key, number))(layer, x)
        return result if aux_weights else (result, {})

    x, aux = jax.lax.scan(one_layer, x, (np.arange(model.num_layers), params["layers"]))
    added = sum(weight * aux[name].sum() for name, weight in aux_weights.items())
    loss = given(model.head, fold_in(key, 2))(params["head"], x, targets)
    return loss + aux_scale * added


def microbatch_key(seed, step, microbatch):
    """The key of one microbatch, made independently of the stages' code."""
    key = jax.random.key(seed)
    for number in (3, step, microbatch):
        key = jax.random.fold_in(key, number)
    return key


class OneDevice:
    """Mean loss, gradients and Optax steps of a model, microbatch after microbatch."""

    def __init__(self, model, seed):
        self.model = model
        self.params, self.seed = initial_params(model, seed), seed
        self._gradients = jit(
            jax.value_and_grad(
                lambda p, tokens, targets, key, aux_scale: loss_sum(
                    model, p, tokens, targets, key, aux_scale
                )
            )
        )

    def loss_and_gradients(self, tokens, targets, random_step=None):
        """Mean loss and gradients of a batch; as in step `random_step`, or without randomness."""
        weight = 1.0 / np.count_nonzero(data_of(self.model, tokens, targets)[1] >= 0)
        total, gradients = 0.0, jax.tree.map(np.zeros_like, self.params)
        for microbatch, batch in enumerate(zip(tokens, targets, strict=True)):
            is_random = random_step is not None
            key = microbatch_key(self.seed, random_step, microbatch) if is_random else None
            aux_scale = np.float32(1 / len(tokens) / weight)  # a mean over microbatches
            loss, gradient = self._gradients(self.params, *batch, key, aux_scale)
            total += float(loss) * weight
            gradients = jax.tree.map(
                lambda sum_, part: sum_ + np.float64(part) * weight, gradients, gradient
            )
        return total, gradients


def optax_steps(one_device, settings: OptimizerSettings, clip_norm, batches):
    """Parameters after AdamW steps, written with Optax's own AdamW and clipping."""
    one_device = copy(one_device)  # the caller's keeps its parameters
    schedule = optax.warmup_cosine_decay_schedule(
        settings.learning_rate / (settings.warmup_steps + 1),
        settings.learning_rate,
        settings.warmup_steps,
        settings.total_steps,
        settings.learning_rate * settings.final_fraction,
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(
            schedule,
            b1=settings.beta1,
            b2=settings.beta2,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            mask=lambda params: jax.tree_util.tree_map_with_path(
                lambda path, leaf: leaf.ndim - (path[0].key == "layers") >= 2, params
            ),
        ),
    )

    @jit
    def update(gradients, state, params):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = without_head_copies(one_device.model, one_device.params)
    state = jit(optimizer.init)(params)
    for tokens, targets in batches:
        _, gradients = one_device.loss_and_gradients(tokens, targets)
        gradients = without_head_copies(one_device.model, gradients)
        gradients = jax.tree.map(np.float32, gradients)
        params, state = update(gradients, state, params)
        one_device.params = untie(one_device.model, params)
    return one_device.params


def without_head_copies(model, tree):
    names = {head_name for _, (head_name,) in model.tied}
    head = {name: leaf for name, leaf in tree["head"].items() if name not in names}
    return {**tree, "head": head}
