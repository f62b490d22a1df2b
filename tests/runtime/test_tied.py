from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmorph.runtime.tied import TiedGradients
from jaxmorph.stage.parameters import leaf_at, with_leaf

TIED = [(("token",), ("norm", "token"))]


def accumulators(*, embed, head):
    tree: dict[str, Any] = {"layers": {"w": jnp.ones(3)}}
    if embed is not None:
        tree["embed"] = {"token": jnp.float32(embed), "position": jnp.zeros(2)}
    if head is not None:
        tree["head"] = {"norm": {"token": jnp.float32(head), "scale": jnp.zeros(2)}}
    return tree


def test_a_leaf_is_found_and_replaced_by_its_path():
    tree = {"a": {"b": 1, "c": 2}, "d": 3}
    assert leaf_at(tree, ("a", "b")) == 1
    assert with_leaf(tree, ("a", "b"), 9) == {"a": {"b": 9, "c": 2}, "d": 3}
    assert tree["a"]["b"] == 1


def test_both_ends_get_bitwise_the_same_sum():
    embed, head = np.float32(1e8), np.float32(-1e8 + 7.3)
    first, last = accumulators(embed=embed, head=None), accumulators(embed=None, head=head)
    on_first = TiedGradients(TIED, first).combine(first, 0, jnp.float32(head))
    on_last = TiedGradients(TIED, last).combine(last, 0, jnp.float32(embed))
    assert on_first["embed"]["token"] == on_last["head"]["norm"]["token"] == embed + head


def test_each_end_sends_its_own_copys_gradient():
    first, last = accumulators(embed=2, head=None), accumulators(embed=None, head=3)
    assert TiedGradients(TIED, first).own_copy(first, 0) == 2
    assert TiedGradients(TIED, last).own_copy(last, 0) == 3


def test_one_rank_sums_both_of_its_copies_into_two_buffers():
    both = accumulators(embed=2, head=3)
    summed = TiedGradients(TIED, both).combine(both, 0, None)
    in_embed, in_head = summed["embed"]["token"], summed["head"]["norm"]["token"]
    assert in_embed == in_head == 5
    assert in_embed.unsafe_buffer_pointer() != in_head.unsafe_buffer_pointer()
