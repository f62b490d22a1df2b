"""Whether a step has the loss and the gradients of plain JAX on the CPU."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmorph.gpu_check.report import Row
from jaxmorph.gpu_check.settings import CheckSettings
from jaxmorph.gpu_check.whole_model import whole_model
from jaxmorph.stage.build import StagePrograms
from jaxmorph.stage.model import Params, PipelineModel

SCALAR_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
"""Of each gradient's largest element. Float32 sums in another order differ by about 1e-6, products
in TF32 by about 1e-3."""


@dataclass(frozen=True)
class Difference:
    """How far a step is from the reference, relatively.

    Attributes:
        norm: Of the norm of all gradients.
        gradients: Of each gradient: the largest difference of an element, as a share of the
            reference's largest element.
    """

    loss: float
    norm: float
    gradients: dict[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """The gradient that is furthest off."""
        return max(self.gradients.items(), key=lambda named: named[1])


@dataclass(frozen=True)
class ParityReport:
    """How far the device's steps are from the CPU's.

    Attributes:
        sizes: Of the model, in words.
        steps: By the ops that made them up: F, B and W, or F and BW.
    """

    sizes: str
    steps: dict[str, Difference]

    def rows(self) -> Iterator[Row]:
        """Three rows for each step."""
        yield Row("model", "float32", self.sizes)
        for ops, found in self.steps.items():
            scalar, gradient = f"at most {SCALAR_TOLERANCE:g}", f"at most {GRADIENT_TOLERANCE:g}"
            name, worst = found.worst
            where = f"{gradient}, of {len(found.gradients)}: {name}"
            yield Row(f"{ops}: loss", f"{found.loss:.1e}", scalar, _small(found.loss))
            yield Row(f"{ops}: gradients' norm", f"{found.norm:.1e}", scalar, _small(found.norm))
            yield Row(
                f"{ops}: worst gradient", f"{worst:.1e}", where, bool(worst <= GRADIENT_TOLERANCE)
            )


def _small(difference: float) -> bool:
    return bool(difference <= SCALAR_TOLERANCE)  # False for NaN too


def measure_parity(settings: CheckSettings) -> ParityReport:
    """How far the stage's programs on the device are from plain JAX on the CPU, in float32."""
    sizes, whole = settings.parity, whole_model(settings.parity)
    rng, shape = np.random.default_rng(0), (2, sizes.microbatch_size, sizes.sequence_length)
    tokens, targets = rng.integers(sizes.vocab_size, size=shape, dtype=np.int32)
    reference = _on_cpu(whole.model, whole.params, tokens, targets)
    steps = {
        "F, B, W": _split_step(whole.programs, whole.params, tokens, targets),
        "F, BW": _unsplit_step(whole.programs, whole.params, tokens, targets),
    }
    found = {ops: difference(*step, *reference) for ops, step in steps.items()}
    return ParityReport(str(sizes), found)


def difference(loss: Any, gradients: Params, expected_loss: Any, expected: Params) -> Difference:
    """How far a loss and gradients are from what was expected.

    Args:
        expected: A tree of the same structure.
    """
    own, wanted = _by_name(gradients), _by_name(expected)
    if own.keys() != wanted.keys():
        raise ValueError(f"got gradients of {sorted(own)}, expected {sorted(wanted)}")
    return Difference(
        loss=_relative(np.float64(loss), np.float64(expected_loss)),
        norm=_relative(_norm(own), _norm(wanted)),
        gradients={name: _relative(own[name], wanted[name]) for name in wanted},
    )


def _by_name(tree: Params) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float64) for path, leaf in leaves}


def _relative(got: Any, expected: Any) -> float:
    return float(np.max(np.abs(got - expected)) / np.max(np.abs(expected)))


def _norm(leaves: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(leaf).sum() for leaf in leaves.values())))


def _on_cpu(model: PipelineModel, params: Params, tokens: Any, targets: Any) -> Any:
    """(Mean loss, gradients) by `jax.value_and_grad` of the whole model."""

    def loss(params: Params) -> jax.Array:
        x = model.embed(params["embed"], tokens)
        x, _ = jax.lax.scan(lambda x, layer: (model.layer(layer, x), None), x, params["layers"])
        return model.head(params["head"], x, targets) / targets.size

    on_cpu = jax.device_put(params, jax.devices("cpu")[0])
    with jax.default_matmul_precision("highest"):
        return jax.jit(jax.value_and_grad(loss))(on_cpu)


def _split_step(programs: StagePrograms, params: Params, tokens: Any, targets: Any) -> Any:
    weights, weight = programs.prepare(params), jnp.float32(1 / targets.size)
    loss, stash = programs.forward(weights, tokens, targets)
    _, weight_stash = programs.backward_input(weights, stash, weight)
    return loss * weight, programs.backward_weight(
        weights, weight_stash, programs.zero_accumulators()
    )


def _unsplit_step(programs: StagePrograms, params: Params, tokens: Any, targets: Any) -> Any:
    weights, weight = programs.prepare(params), jnp.float32(1 / targets.size)
    loss, stash = programs.forward(weights, tokens, targets)
    _, sums = programs.backward(weights, stash, weight, programs.zero_accumulators())
    return loss * weight, sums
