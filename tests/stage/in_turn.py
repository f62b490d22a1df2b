"""Runs stages one after another on one device, beside one `jax.grad` of the whole model."""

import jax
import numpy as np

from jaxmorph.stage.build import StagePrograms
from jaxmorph.stage.equations import walk


class Pipeline:
    """Stages with their parameters; `loss_weight` multiplies the loss sum."""

    def __init__(self, stages, params, loss_weight):
        self.stages, self.params, self.loss_weight = stages, params, loss_weight
        pairs = zip(stages, params, strict=True)
        self.weights = [stage.prepare(own) for stage, own in pairs]

    def gradients(self, split, tokens, targets):
        """The loss, and each stage's gradients by B and W, or by BW."""
        backward = split_backward if split else StagePrograms.backward
        sums = [stage.zero_accumulators() for stage in self.stages]
        loss = 0
        for batch in zip(tokens, targets, strict=True):
            (x, one_targets), stashes = batch, []
            for stage, weights in zip(self.stages, self.weights, strict=True):
                is_last = stage is self.stages[-1]
                x, stash, *_ = stage.forward(weights, x, one_targets if is_last else None)
                stashes.append(stash)
            loss, gradient = loss + x, self.loss_weight
            for i in reversed(range(len(self.stages))):
                arguments = (self.weights[i], stashes[i], gradient, sums[i])
                gradient, sums[i], _ = backward(self.stages[i], *arguments)
            assert gradient is None
        return loss * self.loss_weight, sums


def split_backward(stage, weights, stash, gradient, sums):
    gradient, weight_stash, _ = stage.backward_input(weights, stash, gradient)
    return gradient, *stage.backward_weight(weights, (weight_stash,), sums)


def expected_gradients(model, params, tokens, targets, loss_weight):
    """Loss and gradients of the whole model, separate ones for each copy of a tied parameter."""

    def loss(params, tokens, targets):
        x = model.embed(params["embed"], tokens)
        x, _ = jax.lax.scan(lambda x, p: (model.layer(p, x), None), x, params["layers"])
        return model.head(params["head"], x, targets) * loss_weight

    gradient = jax.jit(jax.value_and_grad(loss))
    each = [gradient(params, *batch) for batch in zip(tokens, targets, strict=True)]
    return jax.tree.map(lambda *leaves: sum(map(np.asarray, leaves)), *each)


def part_of(whole, layers, num_layers):
    """A stage's part of a whole model's parameters."""
    own = jax.tree.map(lambda leaf: leaf[layers.start : layers.stop], whole["layers"])
    ends = {"embed": layers.start == 0, "head": layers.stop == num_layers}
    return jax.device_put({"layers": own} | {name: whole[name] for name in ends if ends[name]})


def joined(stages):
    layers = [stage["layers"] for stage in stages]
    return {
        "embed": stages[0]["embed"],
        "layers": jax.tree.map(lambda *leaves: np.concatenate(leaves), *layers),
        "head": stages[-1]["head"],
    }


def largest_error(got, expected):
    """The largest relative error of any leaf, and that of the norm."""
    got, expected = jax.tree.map(np.asarray, (got, expected))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    error = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b))  # noqa: E731
    flat = [np.concatenate([x.ravel() for x in jax.tree.leaves(t)]) for t in (got, expected)]
    norms = [np.array([np.linalg.norm(x)]) for x in flat]
    errors = [*jax.tree.leaves(jax.tree.map(error, got, expected)), error(*norms)]
    assert np.isfinite(errors).all()
    return max(errors)


def num_of(part, primitive):
    """The equations of a part that apply a primitive, including those in loops and branches."""
    return sum(eqn.primitive.name == primitive for eqn in walk(part.equations))
