from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxmorph.errors import UserError
from jaxmorph.runtime.elementwise import require_elementwise
from jaxmorph.runtime.optimizer import is_matrix

# Of one chunk; every leaf that could hide a norm or a product in its own shape is there.
PARAMS = (
    {
        "layers": {"w": jnp.ones((2, 3, 3)), "b": jnp.ones((2, 3))},
        "head": {"square": jnp.ones((4, 4)), "gain": jnp.ones(())},
    },
)
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 5, 50)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(1e-2, momentum=0.9, nesterov=True),
        optax.adam(SCHEDULE),
        optax.adamw(SCHEDULE, weight_decay=0.1, mask=is_matrix),
        optax.lion(1e-4),
        optax.rmsprop(1e-3),
        optax.adagrad(1e-3),
        optax.radam(1e-3),
        optax.chain(optax.clip(1.0), optax.nadamw(1e-3), optax.ema(0.9)),
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
        optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    ],
    ids=lambda optimizer: None,
)
def test_optimizers_that_update_each_number_by_itself_are_taken(optimizer):
    require_elementwise(optimizer, PARAMS)


@pytest.mark.parametrize(
    ("optimizer", "computes"),
    [
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), "reduce_sum"),
        (optax.lamb(1e-3), "reduce_sum"),
        (optax.adafactor(1e-3), "reduce_"),
        (optax.apply_if_finite(optax.sgd(1e-3), 2), "reduce_"),
        (optax.contrib.muon(1e-3), "(reshape|dot_general|transpose|reduce_sum)"),
        (optax.stateless(lambda updates, _: jax.tree.map(jnp.cumsum, updates)), "cumsum"),
    ],
)
def test_those_that_read_whole_arrays_are_refused_with_what_to_do_instead(optimizer, computes):
    with pytest.raises(
        UserError, match=rf"^optimizer: got one that computes {computes}.*clip_norm"
    ):
        require_elementwise(optimizer, PARAMS)


def test_a_product_of_squares_is_seen_though_it_keeps_the_shape():
    optimizer = optax.stateless(partial(jax.tree.map, jnp.matmul))
    with pytest.raises(UserError, match="optimizer: got one that computes dot_general"):
        require_elementwise(optimizer, {"square": jnp.ones((4, 4))})
