from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.runtime.tied import TiedGradients

TIED = [(("token",), ("norm", "token"))]


def accumulators(*, embed, head, num_chunks=1):
    """Those of each chunk: the first may have the embedding, the last the head."""
    trees: list[dict[str, Any]] = [{"layers": {"w": jnp.ones(3)}} for _ in range(num_chunks)]
    if embed is not None:
        trees[0]["embed"] = {"token": jnp.float32(embed), "position": jnp.zeros(2)}
    if head is not None:
        trees[-1]["head"] = {"norm": {"token": jnp.float32(head), "scale": jnp.zeros(2)}}
    return tuple(trees)


@pytest.mark.parametrize("come_as", [jnp.float32, np.float32])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_both_ends_get_bitwise_the_same_sum(num_chunks, come_as):
    embed, head = np.float32(1e8), np.float32(-1e8 + 7.3)
    first = accumulators(embed=embed, head=None, num_chunks=num_chunks)
    last = accumulators(embed=None, head=head, num_chunks=num_chunks)
    on_first = TiedGradients(TIED, first).combine(first, 0, come_as(head))
    on_last = TiedGradients(TIED, last).combine(last, 0, come_as(embed))
    assert on_first[0]["embed"]["token"] == on_last[-1]["head"]["norm"]["token"] == embed + head


def test_each_end_sends_its_own_copys_gradient():
    first, last = accumulators(embed=2, head=None), accumulators(embed=None, head=3)
    assert TiedGradients(TIED, first).own_copy(first, 0) == 2
    assert TiedGradients(TIED, last).own_copy(last, 0) == 3


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_one_rank_sums_its_copies_into_two_buffers(num_chunks):
    both = accumulators(embed=2, head=3, num_chunks=num_chunks)
    summed = TiedGradients(TIED, both).combine(both, 0, None)
    in_embed, in_head = summed[0]["embed"]["token"], summed[-1]["head"]["norm"]["token"]
    assert in_embed == in_head == 5
    assert in_embed.unsafe_buffer_pointer() != in_head.unsafe_buffer_pointer()
